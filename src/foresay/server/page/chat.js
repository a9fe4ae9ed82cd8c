"use strict";
// Turns: a message with its answers and the settings that it was sent with, so that a comparison sends the same request again.

const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"];
// a speed-up from which on `foresay worth` calls it a gain
const PAYS = 1.05;
// the server's models by name, as it listed them last
let models = new Map();
// the conversation that is shown
let turns = [];
// it before the last message, until that has its first token
let earlierTurns = null;

// undefined until the server has loaded the model
const factsOf = (name) => (models.get(name) ?? [...models.values()][0])?.foresay;
const isText = (name) => factsOf(name)?.chat_template === false;

function newTurn(text) {
  const given = SAMPLING.filter((name) => at(name).value !== "").map((name) => [name, Number(at(name).value)]);
  const sampling = { seed: Math.floor(Math.random() * 2 ** 31), ...Object.fromEntries(given) };
  const model = at("model").length > 1 ? at("model").value : "";
  const drafter = at("drafter").value === "none" ? "" : at("drafter").value;
  return { text, system: at("system").value.trim(), model, drafter, length: at("length").value, sampling, answers: [] };
}

function bodyOf(turn, answer) {
  // the path and body of a request; an answer that has text is continued
  const { system, model, sampling, drafter, length } = turn;
  const method = answer.kind === "plain" ? { drafter: "none" } : { ...(drafter && { drafter }), ...(length && { length }) };
  const body = { ...(model && { model }), ...sampling, stream: true, foresay: { origins: true, stats: true, ...method } };
  const earlier = turns.slice(0, turns.indexOf(turn));
  if (isText(model)) {
    // without a template a conversation is one text
    const texts = [system, ...earlier.flatMap(({ text, answers }) => [text + answers[0].text]), turn.text + answer.text];
    const most = models.get(model)?.max_model_len ?? [...models.values()][0].max_model_len;
    return ["v1/completions", { ...body, max_tokens: body.max_tokens ?? most, prompt: texts.filter(Boolean).join("\n") }];
  }
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { text, answers } of earlier) {
    messages.push({ role: "user", content: text }, { role: "assistant", content: answers[0].text });
  }
  messages.push({ role: "user", content: turn.text });
  if (answer.text) messages.push({ role: "assistant", content: answer.text });
  return ["v1/chat/completions", { ...body, messages, ...(answer.text && { continue_final_message: true }) }];
}

async function sent(turn, answer, signal) {
  const post = ([path, body]) => request(path, { method: "POST", body: JSON.stringify(body), signal });
  const isKnown = factsOf(turn.model);
  return post(bodyOf(turn, answer)).catch(async (error) => {
    // a model that was not loaded may turn out to have no chat template
    if (error.name !== "AbortError" && !isKnown) await showModels().catch(() => {});
    if (isKnown || !isText(turn.model)) throw error;
    return post(bodyOf(turn, answer));
  });
}

function isNoise(speedUp, spread, perPass) {
  // as the command line: is_noise of foresay.text.formatting
  return Math.abs(speedUp - 1) <= spread || (perPass !== null && speedUp > Math.max(1, perPass));
}

function speedOf(turn, fast, plain) {
  // the sentence of `foresay worth`, for one run each
  const [ratio, passes] = [rate(fast) / rate(plain), perPass(fast)];
  if (!(ratio > 0 && ratio < Infinity)) return "";
  const noise = isNoise(ratio, plain.spread, passes);
  const opening = noise ? "The difference is noise" : ratio >= PAYS ? "It pays here" : "Nothing gains here";
  const reason = ratio > Math.max(1, passes ?? Infinity) ? `above its ${passes.toFixed(2)} tokens per pass`
    : `the halves of the plain run differ by ${Math.round(100 * plain.spread)}%`;
  const [mark, because] = noise ? ["~", ` (~: ${reason})`] : ["", ""];
  return `${opening}: ${turn.drafter || "the default drafter"} is ${mark}${ratio.toFixed(2)}x of plain decoding, one run each${because}`;
}

function comparison(turn) {
  const [fast, plain] = ["speculation", "plain"].map((kind) => turn.answers.find((one) => one.kind === kind));
  if (!fast?.reason || !plain?.reason) return "";
  const [one, other] = [fast, plain].map(({ pieces }) => pieces.map(([text]) => text).join(""));
  const texts = one === other ? "both texts are the same"
    : !fast.exact ? "the texts differ: this server's acceptance rule is not exact"
    : turn.sampling.temperature !== 0 ? "the texts differ because they are sampled: two draws from one distribution"
    : "the texts differ at temperature 0: two tokens scored the same up to rounding, or this is an error";
  const sentence = [speedOf(turn, fast, plain), texts].filter(Boolean).join("; ");
  return `${sentence[0].toUpperCase()}${sentence.slice(1)}.`;
}
