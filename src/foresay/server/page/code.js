"use strict";
// The colours of code: comments, strings, numbers, keywords and called names, by the kind of comments that a language has.

// longer blocks stay in one colour: they are read anew whenever they grow
const MOST_CHARACTERS = 30_000;
const STRING = String.raw`"""[^]*?(?:"""|$)|"(?:[^"\\\n]|\\[^])*"|'(?:[^'\\\n]|\\[^])*'|\x60(?:[^\x60\\]|\\[^])*\x60`;
const NAMES = String.raw`(?<number>\b\d[\w.]*)|(?<called>[A-Za-z_$][\w$]*)(?=\()|(?<word>[A-Za-z_$][\w$]*)`;
// names of languages, their comments, and what else they consist of
const LANGUAGES = [
  ["python py bash sh shell zsh yaml yml toml ruby rb r perl make makefile dockerfile julia nix elixir console",
    String.raw`(?<![\w$&{])#[^\n]*`, NAMES],
  ["javascript js jsx typescript ts tsx java c h cpp c++ cc csharp cs go rust rs swift kotlin scala dart php css scss json zig",
    String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`, NAMES],
  ["sql lua haskell hs ada", String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|$)`, NAMES],
  ["html xml svg vue", String.raw`<!--[^]*?(?:-->|$)`, String.raw`(?<tag><\/?[A-Za-z][\w:-]*|\/?>)`],
];
const KEYWORDS = new Set(`abstract and as assert async await begin bool boolean break case catch char class const continue create
  def default del delete do double drop elif else end enum except export extends false False final finally float fn for foreach from
  func function global go group having if impl implements import in insert instanceof int interface into is join lambda let limit
  local long loop match mod module mut namespace new nil None nonlocal not null on or order package pass private protected pub public
  raise return select self set static str string struct super switch table then this throw trait true True try type typeof undefined
  union update use using values var virtual void where while with yield`.split(/\s+/));
const patterns = new Map(LANGUAGES.flatMap(([names, comment, rest]) => {
  const pattern = new RegExp(`(?<comment>${comment})|(?<string>${STRING})|${rest}`, "g");
  return names.split(" ").map((name) => [name, pattern]);
}));

function coloured(text, language) {
  // the nodes of a block of code; strings where there is nothing to colour
  const pattern = patterns.get(language.toLowerCase());
  if (!pattern || text.length > MOST_CHARACTERS) return [text];
  const [out, ignoresCase] = [[], language.toLowerCase() === "sql"];
  let end = 0;
  for (const { 0: found, index, groups } of text.matchAll(pattern)) {
    const isKeyword = groups.tag || ((groups.word || groups.called) && KEYWORDS.has(ignoresCase ? found.toLowerCase() : found));
    const className = isKeyword ? "keyword" : ["comment", "string", "number", "called"].find((one) => groups[one]);
    if (!className) continue;
    out.push(text.slice(end, index), made("span", [found], { className }));
    end = index + found.length;
  }
  return [...out, text.slice(end)];
}
