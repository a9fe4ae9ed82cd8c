"use strict";
// The page: what each control does.

// of the request that runs
let controller = null;
// the position of the message that is edited, and what the field contained before
let editing = null;
let panels = [];

const failed = ({ message }) => report(message);
const stop = () => controller?.abort();
const write = (text) => grow(Object.assign(at("prompt"), { value: text }));

function controls(turn, index) {
  const row = made("div", [], { className: "row actions" });
  if (controller) return row;
  const missing = Object.keys(TITLES).find((kind) => turn.answers.every((one) => one.kind !== kind));
  const cut = turn.answers.filter((one) => one.reason !== "stop" && one.text);
  row.append(copyButton(`Copy answer ${index + 1}`, () => turn.answers[0].text));
  if (index === turns.length - 1) {
    if (cut.length) row.append(button("Continue", `Continue answer ${index + 1}`, () => answerAll(turn, cut)));
    row.append(button("Regenerate", `Regenerate answer ${index + 1}`, () => ask(turn.text, index)));
  }
  if (missing) {
    const title = `Race: ${TITLES[missing]}`;
    row.append(button(title, `${title}, answer ${index + 1}`, () => answerAll(turn, [newAnswer(missing)])));
  }
  if (canReplay(turn)) row.append(button("Race again", `Race again, answer ${index + 1}`, () => answerAll(turn, [])));
  append("p", row, "outcome", comparison(turn));
  if (missing) return row;
  append("p", row, "quiet how", "Each was decoded and timed alone, one after the other; a race replays both as they were timed.");
  return row;
}

function showTurn(turn, index) {
  const box = made("article", [], { className: "turn", ariaLabel: `Message ${index + 1}` });
  at("talk").append(box);
  const message = append("div", box, "message");
  append("div", message, "words raw", turn.text).dir = "auto";
  message.append(button("Edit", `Edit message ${index + 1}`, () => edit(index, turn.text)));
  const answers = append("div", box, "answers");
  panels.push(...turn.answers.map((answer) => new Panel(answers, answer, turn)));
  box.append(controls(turn, index));
}

function show() {
  at("talk").replaceChildren();
  panels = [];
  turns.forEach(showTurn);
  showStart();
  refresh();
}

function showStart() {
  const name = at("model").value;
  const facts = factsOf(name);
  at("name").textContent = name || "No model yet";
  const bytes = `${((facts?.weight_bytes ?? 0) / 1e6).toFixed(0)} MB`;
  const size = [bytes, facts?.precision, `on ${facts?.device}`].filter(Boolean).join(", ");
  const length = models.get(name)?.max_model_len;
  const known = facts && { Weights: size, Context: `${length} tokens`, Drafter: facts.drafter, "Draft length": facts.length,
    "Acceptance rule": facts.rule, ...(facts.chat_template ? {} : { "Chat template": "none: it continues your text" }) };
  const rows = Object.entries(known ?? (name ? { State: "loaded with the first message" } : {}));
  at("facts").replaceChildren(...rows.map(([title, text]) => made("div", [made("dt", [title]), made("dd", [text])])));
  const choices = facts?.choices ?? {};
  for (const id of ["drafter", "length"]) {
    const names = (choices[id] ?? []).concat(id === "length" ? ["2", "4", "8"] : []);
    const named = names.map((one) => [one, one === "none" ? "none: plain decoding" : one.replace(/^\d$/, "always $& tokens")]);
    offer(id, [["", `the server's${facts ? `: ${facts[id]}` : ""}`], ...named]);
  }
  // next to plain decoding, plain decoding is no race
  at("compare").disabled = (chosen("drafter") || facts?.drafter) === "none";
}

function refresh() {
  // what depends on whether a request runs; answers keep their nodes
  at("send").disabled = Boolean(controller);
  at("stop").disabled = !controller;
  [...at("talk").children].forEach((box, index) => {
    box.querySelector(".message button").disabled = Boolean(controller);
    box.querySelector(".actions").replaceWith(controls(turns[index], index));
  });
  const focused = document.activeElement;
  if (!focused || focused === document.body || focused.disabled) at("prompt").focus();
}

const panelsOf = (turn) => panels.filter((one) => turn.answers.includes(one.answer));
// of an answer that was continued, only the last request is recorded
const canReplay = (turn) => turn.answers.length > 1 && panelsOf(turn).every((one) => one.recorded.length && !one.before);

function panelOf(turn, answer) {
  const parent = at("talk").children[turns.indexOf(turn)].querySelector(".answers");
  const panel = panels.find((one) => one.answer === answer) ?? new Panel(parent, answer, turn);
  panel.state.textContent = " · waits for its turn";
  if (!panels.includes(panel)) panels.push(panel);
  if (!turn.answers.includes(answer)) turn.answers.push(answer);
  return panel;
}

async function answerAll(turn, answers) {
  const mine = new AbortController();
  controller = mine;
  following = true;
  report("");
  at("status").textContent = "Generating";
  talk.at = Date.now();
  refresh();
  const running = answers.map((answer) => panelOf(turn, answer));
  const all = panelsOf(turn);
  all[0].box.parentElement.classList.toggle("race", all.length > 1);
  try {
    // one after the other: two at once would slow each other down, and a replay would slow the browser's and the server's processor
    for (const panel of running) await panel.run((signal) => sent(turn, panel.answer, signal), mine.signal);
    const most = Math.max(...all.map(({ answer }) => answer.tokens));
    const replays = canReplay(turn) ? all.map((panel) => panel.replay(mine.signal, most)) : [];
    for (const replay of replays) await replay;
  } catch (error) {
    if (error.name !== "AbortError") failed(error);
  }
  current = null;
  // "New chat" ends a request too, and another one may have begun since
  if (controller !== mine) return;
  controller = null;
  turn.answers = turn.answers.filter(isKept);
  for (const { box, bar, answer } of panels) {
    if (!isKept(answer)) box.remove();
    box.parentElement?.classList.remove("race");
    bar.hidden = true;
  }
  panels = panels.filter(({ answer }) => isKept(answer));
  if (at("status").textContent === "Generating") at("status").textContent = "";
  refresh();
  if (following && turn === turns.at(-1)) at("talk").scrollTop = at("talk").scrollHeight;
  save();
  if (!factsOf(turn.model)) showModels().catch(() => {});
}

async function ask(text, index) {
  // false if the server refused, or stopped before the first token: the conversation is then as it was
  const wrong = SAMPLING.map(at).find((one) => !one.checkValidity());
  if (wrong) at("settings").togglePopover(true);
  if (controller || wrong?.reportValidity() === false) return false;
  // else a message would go to the first model, whichever was chosen
  if (!models.size) await showModels().catch(failed);
  if (!models.size || controller) return false;
  const before = (earlierTurns = turns);
  const turn = newTurn(text);
  turns = [...turns.slice(0, index), turn];
  show();
  const kinds = at("compare").checked && !at("compare").disabled ? Object.keys(TITLES)
    : [chosen("drafter") === "none" ? "plain" : "speculation"];
  await answerAll(turn, kinds.map(newAnswer));
  if (earlierTurns === before) earlierTurns = null;
  if (turn.answers.length || !turns.includes(turn)) return true;
  turns = before;
  show();
  save();
  return false;
}

function edit(index, text) {
  editing = { index, before: editing?.before ?? at("prompt").value };
  at("editing").hidden = false;
  write(text);
  at("prompt").focus();
}

function endEditing() {
  if (editing) write(editing.before);
  editing = null;
  at("editing").hidden = true;
}

async function send() {
  const text = at("prompt").value.trim();
  if (!text || controller) return;
  const [index, isNew] = [editing?.index ?? turns.length, !editing];
  if (isNew) write("");
  endEditing();
  if (await ask(text, index)) return;
  if (isNew) write([text, at("prompt").value].filter(Boolean).join("\n"));
  else edit(index, text);
}

function openTalk(one) {
  // what was written of a running answer is kept
  if (controller) save();
  stop();
  controller = earlierTurns = null;
  [talk, turns] = [{ ...one }, one.turns];
  endEditing();
  at("problem").textContent = at("status").textContent = "";
  show();
  saveSettings();
  showTalks();
  at("chats").togglePopover(false);
  at("talk").scrollTop = at("talk").scrollHeight;
  at("prompt").focus();
}

async function showModels() {
  // a model may have several names
  const listed = (await (await request("v1/models")).json()).data.filter(({ id, root }) => id === root);
  models = new Map(listed.map((one) => [one.id, one]));
  offer("model", listed.map(({ id }) => [id, id]));
  at("model").disabled = listed.length < 2;
  showStart();
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("form").requestSubmit();
});
addEventListener("keydown", (event) => {
  // Escape closes what is open first
  if (event.key !== "Escape" || event.isComposing || document.querySelector(":popover-open")) return;
  if (controller) stop();
  else endEditing();
});
// scrolling up stops following; scrolling back to the end resumes it
at("talk").addEventListener("scroll", () => (following = current ? hiddenPixels(current) < 32 : following));
addEventListener("resize", follow);
at("prompt").addEventListener("input", () => grow(at("prompt")));
at("stop").addEventListener("click", stop);
at("clear").addEventListener("click", () => openTalk(newTalk()));
at("cancel").addEventListener("click", endEditing);
at("search").addEventListener("input", showTalks);
for (const id of [...SWITCHES, ...FIELDS]) {
  at(id).addEventListener("change", () => {
    choose(id, at(id).value);
    saveSettings();
    showStart();
    if (id === "origins") for (const panel of panels) panel.redraw();
  });
}
addEventListener("pagehide", () => controller && save());
// another tab changed a conversation or the settings
addEventListener("storage", (event) => {
  if (event.key === SETTINGS) loadSettings();
  if (!event.key?.startsWith(STORED)) return;
  if (event.newValue) read(event.key, event.newValue);
  else talks.delete(event.key.slice(STORED.length));
  showTalks();
  if (!event.newValue || event.key !== STORED + talk.id || controller || editing) return;
  talk = talks.get(talk.id);
  turns = talk.turns;
  show();
});
at("key").addEventListener("change", () => showModels().then(() => report(""), failed));
for (const one of at("examples").children) one.addEventListener("click", () => (write(one.textContent), send()));

load();
show();
showTalks();
at("talk").scrollTop = at("talk").scrollHeight;
showModels().catch(failed);
at("prompt").focus();
