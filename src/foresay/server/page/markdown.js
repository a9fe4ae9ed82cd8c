"use strict";
// Markdown as nodes of the document. marked splits the text into tokens; its HTML is not used, so nothing has to be
// removed from it: what is not made here does not exist. HTML in an answer is shown as text, images are links.

const TAGS = Object.fromEntries(["strong", "em", "del", "blockquote", "br", "hr"].map((name) => [name, name]));
Object.assign(TAGS, { paragraph: "p", list_item: "li" });
const SAFE = /^(https?:|mailto:)/i;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", ndash: "–", mdash: "—", hellip: "…",
  copy: "©", deg: "°", times: "×", divide: "÷", plusmn: "±", le: "≤", ge: "≥", ne: "≠", larr: "←", rarr: "→", bull: "•" };
// quotes and lists, one in another: the parser's time grows with the square of their number
const DEEP = /^[ \t]*(?:(?:>|(?:[-*+]|\d{1,9}[.)])[ \t])[ \t]*){33}/m;
// of each element that shows markdown, the texts of its blocks
const shown = new WeakMap();

function decoded(text) {
  // the page may not parse HTML, so these names alone are known; others stay as written
  return text.replace(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|([a-z]+));/g, (all, decimal, hex, name) => {
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : all;
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code > 0x10ffff || code === 0 ? "\ufffd" : String.fromCodePoint(code);
  });
}

function link(token, children) {
  const href = decoded(token.href);
  if (!SAFE.test(href)) return token.raw;
  return made("a", children, { href, target: "_blank", rel: "noopener noreferrer" });
}

function codeBlock(token) {
  const language = (token.lang ?? "").split(/\s/)[0];
  const bar = made("div", [made("span", [language]), copyButton("Copy code", () => token.text)], { className: "bar" });
  const region = { tabIndex: 0, role: "region", ariaLabel: `Code ${language}`.trim() };
  const code = made("pre", [made("code", coloured(token.text, language))], region);
  return made("div", [bar, code], { className: "code", dir: "ltr" });
}

function table(token) {
  const row = (kind) => (cells) =>
    made("tr", cells.map((cell) => made(kind, nodes(cell.tokens), { className: cell.align ?? "", dir: "auto" })));
  const parts = [made("thead", [token.header].map(row("th"))), made("tbody", token.rows.map(row("td")))];
  return made("div", [made("table", parts)], { className: "wide", tabIndex: 0, role: "region", ariaLabel: "Table" });
}

function list(token) {
  const items = nodes(token.items);
  return token.ordered ? made("ol", items, { start: token.start, dir: "auto" }) : made("ul", items, { dir: "auto" });
}

function node(token) {
  // each paragraph has the direction of its own text, and a list that of its first item
  if (token.type in TAGS) return made(TAGS[token.type], nodes(token.tokens ?? []), token.type === "paragraph" ? { dir: "auto" } : {});
  switch (token.type) {
    // the page has a heading of its own, and so has each answer
    case "heading": return made(`h${Math.min(6, token.depth + 2)}`, nodes(token.tokens), { dir: "auto" });
    case "code": return codeBlock(token);
    case "codespan": return made("code", [token.text]);
    case "list": return list(token);
    case "table": return table(token);
    case "checkbox": return token.checked ? "☑ " : "☐ ";
    case "link": return link(token, nodes(token.tokens));
    case "image": return link(token, [`image: ${decoded(token.text) || token.href}`]);
    case "html": return token.raw;
  }
  if (token.tokens) return made("span", nodes(token.tokens));
  return token.type === "text" ? decoded(token.text) : token.text;
}

const nodes = (tokens) => tokens.map(node);

function showMarkdown(element, text) {
  // blocks that did not change keep their nodes, and a selection in them stays
  try {
    if (DEEP.test(text)) throw new RangeError("nested too deeply");
    const tokens = marked.lexer(text, { gfm: true, breaks: true });
    // a definition changes links of other blocks
    const old = tokens.some((one) => one.type === "def") ? [] : (shown.get(element) ?? []);
    const blocks = tokens.filter((one) => one.type !== "space" && one.type !== "def");
    let same = 0;
    while (same < Math.min(old.length, blocks.length) && old[same] === blocks[same].raw) same++;
    const fresh = nodes(blocks.slice(same)).map((one) => (typeof one === "string" ? made("p", [one], { dir: "auto" }) : one));
    element.replaceChildren(...[...element.childNodes].slice(0, same), ...fresh);
    shown.set(element, blocks.map((one) => one.raw));
  } catch {
    // nested too deeply, for a recursive parser too
    element.replaceChildren(made("p", [text], { className: "raw", dir: "auto" }));
    shown.delete(element);
  }
}
