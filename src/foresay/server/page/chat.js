"use strict";
// The conversation: turns of a message and its answers, kept in this browser's storage. A turn keeps the settings that it
// was sent with, so that a comparison sends the same request again.

const STORED = "foresay.chat.1";
const SWITCHES = ["draft", "compare", "origins"];
const FIELDS = ["temperature", "tokens", "system", "model"];
let turns = [];
// the conversation before the last message, until that has its first token
let earlierTurns = null;

function chosenModel() {
  // the kept one until the server has named its models
  return at("model").value || at("model").dataset.kept || "";
}

function keepModel(name) {
  at("model").dataset.kept = name;
  if ([...at("model").options].some((one) => one.value === name)) at("model").value = name;
}

function newTurn(text) {
  const seed = Math.floor(Math.random() * 2 ** 31);
  const [temperature, max_tokens] = [Number(at("temperature").value), Number(at("tokens").value)];
  const model = at("model").length > 1 ? at("model").value : "";
  return { text, system: at("system").value.trim(), model, temperature, max_tokens, seed, answers: [] };
}

function bodyOf(turn) {
  const { system, model, temperature, max_tokens, seed } = turn;
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const earlier of turns.slice(0, turns.indexOf(turn))) {
    messages.push({ role: "user", content: earlier.text }, { role: "assistant", content: earlier.answers[0].text });
  }
  messages.push({ role: "user", content: turn.text });
  return { ...(model ? { model } : {}), messages, temperature, max_tokens, seed };
}

function isNoise(speedUp, spread, perPass) {
  // as the command line: is_noise of foresay.text.formatting
  return Math.abs(speedUp - 1) <= spread || (perPass !== null && speedUp > Math.max(1, perPass));
}

function comparison(turn) {
  const [fast, plain] = ["speculation", "plain"].map((kind) => turn.answers.find((one) => one.kind === kind));
  if (!fast?.complete || !plain?.complete) return "";
  const [one, other] = [fast, plain].map(({ pieces }) => pieces.map(([text]) => text).join(""));
  const ratio = fast.rate && plain.rate ? fast.rate / plain.rate : 0;
  const perPass = fast.perPass ?? null;
  const [mark, reason] = isNoise(ratio, 0, perPass) ? ["~", ` (~ noise at ${perPass?.toFixed(2) ?? "–"} tokens per pass)`] : ["", ""];
  const speed = ratio ? ` Speculation: ${mark}${ratio.toFixed(2)} times the tokens per second, one run each${reason}.` : "";
  if (one === other) return `Both texts are the same.${speed}`;
  if (!fast.exact) return `The texts differ: this server's acceptance rule is not exact.${speed}`;
  if (turn.temperature > 0) return `The texts differ because they are sampled: two draws from one distribution.${speed}`;
  return `The texts differ at temperature 0: two tokens scored the same up to rounding, or this is an error.${speed}`;
}

function merged(pieces) {
  const out = [];
  for (const [text, origin] of pieces) {
    if (out.at(-1)?.[1] === origin) out.at(-1)[0] += text;
    else out.push([text, origin]);
  }
  return out;
}

function save() {
  const isAnswered = turns.at(-1)?.answers.some(isKept);
  const kept = (earlierTurns && !isAnswered ? earlierTurns : turns)
    .map((turn) => ({ ...turn, answers: turn.answers.filter(isKept) }))
    .filter((turn) => turn.answers.length);
  for (const turn of kept) turn.answers = turn.answers.map((answer) => ({ ...answer, pieces: merged(answer.pieces) }));
  const switches = SWITCHES.map((id) => [id, at(id).checked]);
  const fields = FIELDS.map((id) => [id, id === "model" ? chosenModel() : at(id).value]);
  try {
    localStorage.setItem(STORED, JSON.stringify({ turns: kept, switches, fields }));
  } catch {
    at("problem").textContent = "this conversation is not kept: the browser's storage is full or switched off";
  }
}

function isAnswer(answer) {
  const texts = [answer.text, answer.reasoning, answer.figures].every((one) => typeof one === "string");
  const pieces = answer.pieces.every(([text, origin]) => typeof text === "string" && ORIGINS.includes(origin));
  const numbers = [answer.rate, answer.perPass ?? null].every((one) => one === null || Number.isFinite(one));
  return texts && pieces && numbers && answer.kind in TITLES;
}

function isTurn({ text, system, model = "", temperature, max_tokens, seed, answers }) {
  const numbers = [temperature, max_tokens, seed].every(Number.isFinite);
  const texts = [text, system, model].every((one) => typeof one === "string");
  return texts && numbers && answers.length > 0 && answers.every(isAnswer);
}

function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(STORED));
    if (!kept) return;
    if (!kept.turns.every(isTurn)) throw new Error("not a conversation");
    turns = kept.turns;
    for (const [id, value] of kept.switches) if (SWITCHES.includes(id)) at(id).checked = value === true;
    for (const [id, value] of kept.fields) {
      if (id === "model") keepModel(String(value));
      else if (FIELDS.includes(id)) at(id).value = value;
    }
  } catch {
    at("problem").textContent = "the conversation that this browser kept cannot be read";
  }
}
