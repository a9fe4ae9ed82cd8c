"use strict";
// Elements, the clipboard and files.

const at = (id) => document.getElementById(id);
const report = (text) => (at("problem").textContent = text);

function made(kind, children = [], properties = {}) {
  // strings become text nodes: no text is ever parsed as HTML
  const element = Object.assign(document.createElement(kind), properties);
  element.append(...children);
  return element;
}

function append(kind, parent, className, text = "") {
  const element = made(kind, [text], { className });
  parent.append(element);
  return element;
}

function button(text, label, action) {
  const element = made("button", [text], { type: "button", ...(label ? { ariaLabel: label } : {}) });
  element.addEventListener("click", action);
  return element;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // browsers offer no clipboard to a page without TLS, except on this machine
    const field = made("textarea", [], { value: text, className: "unseen" });
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

function copyButton(label, text) {
  const element = button("Copy", label, async () => {
    element.textContent = (await copied(text())) ? "Copied" : "Not copied";
    at("status").textContent = element.textContent;
    element.focus();
    setTimeout(() => (element.textContent = "Copy"), 2000);
  });
  return element;
}

function download(title, ending, type, text) {
  const href = URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60).replace(/^-|-$/g, "") || "conversation";
  made("a", [], { href, download: `${name}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

function grow(field) {
  // as many rows as the text has, up to the height that the style sheet allows
  field.rows = 1;
  while (field.rows < 16 && field.scrollHeight > field.clientHeight) field.rows += 1;
}
