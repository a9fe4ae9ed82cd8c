"use strict";
// The list of conversations, each under a key of its own in this browser's storage, and the settings, which all of them share.

const [STORED, SETTINGS] = ["foresay.talk.", "foresay.settings"];
const SWITCHES = ["compare", "origins"];
const FIELDS = [...SAMPLING, "drafter", "length", "system", "model"];
const talks = new Map();
let talk = newTalk();

function newTalk() {
  return { id: Date.now().toString(36) + Math.random().toString(36).slice(2, 8), title: "", at: Date.now(), turns: [] };
}

const titleOf = ({ title, turns }) => title || turns[0]?.text.slice(0, 80).split("\n")[0] || "New chat";
// a list's choice is kept until the server has named what there is
const chosen = (id) => at(id).dataset.kept ?? at(id).value;
const choose = (id, value) => (at(id).dataset.kept = at(id).value = value);

function offer(id, options) {
  const wanted = chosen(id);
  at(id).replaceChildren(...options.map(([value, text]) => made("option", [text], { value })));
  if (options.some(([value]) => value === wanted)) at(id).value = wanted;
}

function merged(answer) {
  const pieces = [];
  for (const [text, origin] of answer.pieces) {
    if (pieces.at(-1)?.[1] === origin) pieces.at(-1)[0] += text;
    else pieces.push([text, origin]);
  }
  return { ...answer, pieces };
}

function keptTurns() {
  const isAnswered = turns.at(-1)?.answers.some(isKept);
  return (earlierTurns && !isAnswered ? earlierTurns : turns)
    .map((turn) => ({ ...turn, answers: turn.answers.filter(isKept).map(merged) }))
    .filter((turn) => turn.answers.length);
}

function store(change) {
  try {
    change(localStorage);
  } catch {
    report("this conversation is not kept: the browser's storage is full or switched off");
  }
}

function keep(one) {
  if (one.turns.length) talks.set(one.id, one);
  else talks.delete(one.id);
  const key = STORED + one.id;
  store((storage) => (one.turns.length ? storage.setItem(key, JSON.stringify(one)) : storage.removeItem(key)));
  showTalks();
}

function saveSettings() {
  const switches = SWITCHES.map((id) => [id, at(id).checked]);
  const fields = FIELDS.map((id) => [id, chosen(id)]);
  store((storage) => storage.setItem(SETTINGS, JSON.stringify({ talk: talk.id, switches, fields })));
}

function save() {
  keep({ ...talk, turns: keptTurns() });
  saveSettings();
}

const isLike = (found, sample) => Object.entries(sample).every(([key, value]) => typeof found[key] === typeof value);

function isTurn(turn) {
  const isPiece = ([text, origin]) => typeof text === "string" && ORIGINS.includes(origin);
  const isAnswer = (one) => isLike(one, newAnswer("")) && one.kind in TITLES && one.pieces.every(isPiece);
  const isLikeOne = isLike(turn, { text: "", system: "", model: "", drafter: "", length: "" });
  return isLikeOne && Object.values(turn.sampling).every(Number.isFinite) && turn.answers.length > 0 && turn.answers.every(isAnswer);
}

function read(key, text) {
  try {
    const found = JSON.parse(text);
    if (STORED + found.id !== key || !isLike(found, newTalk()) || !found.turns.every(isTurn)) throw new Error(key);
    talks.set(found.id, found);
  } catch {
    // reported once, and left in the storage
    localStorage.setItem(`foresay.unreadable.${key}`, text);
    localStorage.removeItem(key);
    report("a conversation that this browser kept cannot be read; it is no longer listed");
  }
}

function loadSettings() {
  const kept = JSON.parse(localStorage.getItem(SETTINGS));
  for (const [id, value] of kept?.switches ?? []) if (SWITCHES.includes(id)) at(id).checked = value === true;
  for (const [id, value] of kept?.fields ?? []) if (FIELDS.includes(id)) choose(id, String(value));
  return kept?.talk;
}

function load() {
  try {
    for (const key of Object.keys(localStorage).filter((one) => one.startsWith(STORED))) read(key, localStorage.getItem(key));
    talk = talks.get(loadSettings()) ?? talk;
    turns = talk.turns;
  } catch {
    report("conversations are not kept: the browser's storage cannot be read or is switched off");
  }
}

function asMarkdown(one) {
  const named = (answer, { model, drafter }) => [titleOfAnswer(answer, drafter), model].filter(Boolean).join(" · ");
  const answered = (turn) => (one) => [`## Answer ${named(one, turn)}`, one.text, `*${described(one).join(" · ")}*`];
  const parts = one.turns.flatMap((turn) => [
    ...(turn.system ? ["## System prompt", turn.system] : []), "## Message", turn.text, ...turn.answers.flatMap(answered(turn)),
  ]);
  return `${[`# ${titleOf(one)}`, ...parts].join("\n\n")}\n`;
}

function forget(one) {
  if (!confirm(`Delete “${titleOf(one)}”?`)) return;
  stop();
  [turns, earlierTurns] = [[], null];
  save();
  openTalk(newTalk());
}

function row(one) {
  if (one.id !== talk.id) {
    const title = button(titleOf(one), "", () => openTalk(one));
    return made("li", [Object.assign(title, { dir: "auto" })]);
  }
  const title = made("input", [], { value: titleOf(one), ariaLabel: "Title of this conversation", maxLength: 100, dir: "auto" });
  title.addEventListener("change", () => {
    talk.title = title.value.trim();
    keep({ ...talks.get(one.id), title: talk.title });
  });
  const saved = (kind, text) => () => download(titleOf(talks.get(one.id)), ...kind, text(talks.get(one.id)));
  const actions = [
    button("Markdown", "Export as Markdown", saved(["md", "text/markdown"], asMarkdown)),
    button("JSON", "Export as JSON", saved(["json", "application/json"], (all) => JSON.stringify(all, null, 2))),
    button("Delete", "", () => forget(one)),
  ];
  return made("li", [title, made("div", actions, { className: "row" })], { ariaCurrent: "true" });
}

function showTalks() {
  const wanted = at("search").value.trim().toLowerCase();
  const textsOf = ({ text, answers }) => [text, ...answers.map((answer) => answer.text)];
  const has = (one) => [titleOf(one), ...one.turns.flatMap(textsOf)].some((text) => text.toLowerCase().includes(wanted));
  const found = [...talks.values()].filter(has).sort((one, other) => other.at - one.at);
  at("nothing").textContent = found.length ? "" : wanted ? "No conversation contains this." : "No conversation is kept yet.";
  // rows that did not change keep their focus, also while the title of this conversation is changed
  const key = JSON.stringify([talk.id, ...found.map((one) => [one.id, one.id !== talk.id && titleOf(one)])]);
  if (key === at("list").dataset.shown) return;
  at("list").dataset.shown = key;
  at("list").replaceChildren(...found.map(row));
}
