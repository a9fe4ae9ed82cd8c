"use strict";
// The page: what each control does.

// of the request that runs
let controller = null;
// the position of the message that is edited, and what the field contained before
let editing = null;
let panels = [];

function controls(turn, index) {
  const row = made("div", [], { className: "row actions" });
  if (controller) return row;
  const missing = Object.keys(TITLES).find((kind) => turn.answers.every((one) => one.kind !== kind));
  row.append(copyButton(`Copy answer ${index + 1}`, () => turn.answers[0].text));
  if (index === turns.length - 1) {
    row.append(button("Regenerate", `Regenerate answer ${index + 1}`, () => ask(turn.text, index)));
  }
  if (missing) {
    const title = `Compare: ${TITLES[missing]}`;
    row.append(button(title, `${title}, answer ${index + 1}`, () => answerAll(turn, [missing])));
  }
  append("span", row, "quiet outcome", comparison(turn));
  return row;
}

function showTurn(turn, index) {
  const box = made("article", [], { className: "turn", ariaLabel: `Message ${index + 1}` });
  at("talk").append(box);
  const message = append("div", box, "message");
  append("div", message, "words raw", turn.text);
  message.append(button("Edit", `Edit message ${index + 1}`, () => edit(index, turn.text)));
  const answers = append("div", box, "answers");
  panels.push(...turn.answers.map((answer) => new Panel(answers, answer, turn.model)));
  box.append(controls(turn, index));
}

function show() {
  at("talk").replaceChildren();
  panels = [];
  turns.forEach(showTurn);
  refresh();
}

function refresh() {
  // what depends on whether a request runs; answers keep their nodes
  at("legend").hidden = !at("origins").checked;
  at("send").disabled = Boolean(controller);
  at("stop").disabled = !controller;
  [...at("talk").children].forEach((box, index) => {
    box.querySelector(".message button").disabled = Boolean(controller);
    box.querySelector(".actions").replaceWith(controls(turns[index], index));
  });
  const focused = document.activeElement;
  if (!focused || focused === document.body || focused.disabled) at("prompt").focus();
}

async function answerAll(turn, kinds) {
  const mine = new AbortController();
  const body = bodyOf(turn);
  controller = mine;
  following = true;
  at("problem").textContent = "";
  at("status").textContent = "Generating";
  refresh();
  const parent = at("talk").children[turns.indexOf(turn)].querySelector(".answers");
  try {
    // one after the other: two at once would slow each other down
    for (const kind of kinds) {
      const panel = new Panel(parent, newAnswer(kind), turn.model);
      panels.push(panel);
      turn.answers.push(panel.answer);
      await panel.run(body, mine.signal);
    }
  } catch (error) {
    if (error.name !== "AbortError") at("problem").textContent = error.message;
  }
  finish(turn, mine);
}

function finish(turn, mine) {
  // "New chat" ends a request too, and another one may have begun since
  if (controller !== mine) return;
  controller = null;
  turn.answers = turn.answers.filter(isKept);
  for (const panel of panels.filter(({ answer }) => !isKept(answer))) panel.box.remove();
  panels = panels.filter(({ answer }) => isKept(answer));
  if (at("status").textContent === "Generating") at("status").textContent = "";
  refresh();
  if (following && turn === turns.at(-1)) at("talk").scrollTop = at("talk").scrollHeight;
  save();
}

async function ask(text, index) {
  // false if the server refused, or stopped before the first token: the conversation is then as it was
  if (controller || !["temperature", "tokens"].every((id) => at(id).reportValidity())) return false;
  if (!(await knowsModels())) return false;
  const before = (earlierTurns = turns);
  const turn = newTurn(text);
  turns = [...turns.slice(0, index), turn];
  show();
  await answerAll(turn, at("compare").checked ? Object.keys(TITLES) : [at("draft").checked ? "speculation" : "plain"]);
  if (earlierTurns === before) earlierTurns = null;
  if (turn.answers.length || !turns.includes(turn)) return true;
  turns = before;
  show();
  save();
  return false;
}

function edit(index, text) {
  const before = editing ? editing.before : at("prompt").value;
  editing = { index, before };
  at("editing").hidden = false;
  at("prompt").value = text;
  at("prompt").focus();
}

function endEditing() {
  if (editing) at("prompt").value = editing.before;
  editing = null;
  at("editing").hidden = true;
}

async function send() {
  const text = at("prompt").value.trim();
  if (!text || controller) return;
  const index = editing ? editing.index : turns.length;
  const isNew = !editing;
  if (isNew) at("prompt").value = "";
  endEditing();
  if (await ask(text, index)) return;
  if (isNew) at("prompt").value = [text, at("prompt").value].filter(Boolean).join("\n");
  else edit(index, text);
}

function stop() {
  controller?.abort();
}

function startAgain() {
  stop();
  controller = earlierTurns = null;
  turns = [];
  endEditing();
  at("problem").textContent = at("status").textContent = "";
  show();
  save();
  at("prompt").focus();
}

async function showModels() {
  // a model may have several names
  const listed = (await (await request("v1/models")).json()).data.filter(({ id, root }) => id === root);
  const names = listed.map(({ id }) => id);
  const wanted = chosenModel();
  at("model").replaceChildren(...names.map((name) => made("option", [name])));
  keepModel(wanted);
  at("model").disabled = names.length < 2;
}

async function knowsModels() {
  // else a message would go to the first model, whichever was chosen
  try {
    if (!at("model").length) await showModels();
  } catch (error) {
    at("problem").textContent = error.message;
  }
  return at("model").length > 0 && !controller;
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("form").requestSubmit();
  }
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (controller) stop();
  else endEditing();
});
// scrolling up stops following; scrolling back to the end resumes it
at("talk").addEventListener("scroll", () => {
  if (current) following = hiddenPixels(current) < 32;
});
addEventListener("resize", follow);
at("stop").addEventListener("click", stop);
at("clear").addEventListener("click", startAgain);
at("cancel").addEventListener("click", endEditing);
at("origins").addEventListener("change", () => {
  for (const panel of panels) panel.redraw();
  at("legend").hidden = !at("origins").checked;
});
for (const id of [...SWITCHES, ...FIELDS]) at(id).addEventListener("change", save);
addEventListener("pagehide", () => {
  if (controller) save();
});
// another tab changed the conversation
addEventListener("storage", (event) => {
  if (event.key !== STORED || controller || editing) return;
  load();
  show();
});
at("key").addEventListener("change", () => {
  showModels().then(() => (at("problem").textContent = ""), (error) => (at("problem").textContent = error.message));
});

load();
show();
at("talk").scrollTop = at("talk").scrollHeight;
showModels().catch((error) => (at("problem").textContent = error.message));
at("prompt").focus();
