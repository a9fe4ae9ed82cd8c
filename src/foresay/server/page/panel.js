"use strict";
// One answer: its request, its stream and how it is shown.

const RECENT = 8;
const TITLES = { speculation: "with speculation", plain: "plain" };
const ORIGINS = ["draft", "residual", "bonus"];
// the panel being filled, and true while its end is kept in view
let current = null;
let following = true;

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function request(path, options = {}) {
  const answer = await fetch(path, { headers: headers(), ...options }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("the server cannot be reached");
  });
  if (answer.ok) return answer;
  if (answer.status === 401) at("keyed").hidden = false;
  const body = await answer.json().catch(() => null);
  throw new Error(body?.error?.message ?? `the server answered ${answer.status}`);
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error("the connection to the server was lost");
    });
    if (done) return;
    const parts = (left + value).split("\n\n");
    left = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function hiddenPixels(panel) {
  // pixels of a panel below the visible part of the conversation
  return panel.box.getBoundingClientRect().bottom - at("talk").getBoundingClientRect().bottom;
}

function follow() {
  if (current && following) at("talk").scrollTop += Math.max(0, hiddenPixels(current));
}

function isKept(answer) {
  return answer.complete || answer.pieces.length > 0;
}

function newAnswer(kind) {
  return { kind, text: "", reasoning: "", pieces: [], figures: "waiting", rate: null, perPass: null, complete: false, exact: true };
}

class Panel {
  constructor(parent, answer, model = "") {
    this.answer = answer;
    this.box = append("section", parent, "answer");
    append("h2", this.box, "", [TITLES[answer.kind], model].filter(Boolean).join(" · "));
    this.reasoning = append("details", this.box, "reasoning");
    append("summary", this.reasoning, "", "Reasoning");
    append("div", this.reasoning, "raw");
    this.text = append("div", this.box, "text");
    this.figures = append("p", this.box, "figures");
    this.tokens = this.passes = this.undrafted = this.firstTokens = 0;
    this.began = this.first = this.last = 0;
    this.frame = 0;
    this.redraw();
  }

  redraw() {
    this.text.replaceChildren();
    shown.delete(this.text);
    this.drawn = 0;
    this.draw();
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { text, reasoning, pieces, figures } = this.answer;
    const byOrigin = at("origins").checked;
    this.text.classList.toggle("raw", byOrigin);
    this.reasoning.hidden = byOrigin || !reasoning;
    this.reasoning.lastChild.textContent = reasoning;
    if (!byOrigin) showMarkdown(this.text, text);
    else for (const [piece, origin] of pieces.slice(this.drawn)) append("span", this.text, origin, piece);
    this.drawn = pieces.length;
    this.figures.textContent = figures;
    follow();
  }

  take(choice) {
    const { answer } = this;
    const extension = choice.foresay ?? {};
    this.last = performance.now();
    answer.text += choice.delta.content ?? "";
    answer.reasoning += choice.delta.reasoning_content ?? "";
    answer.pieces.push(...(extension.origins ?? []));
    if (choice.finish_reason) answer.complete = true;
    answer.exact &&= extension.exact ?? true;
    if (extension.origins) this.count(extension);
    this.describe(choice.finish_reason, extension.draft_error);
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  count({ tokens, drafted }) {
    this.tokens += tokens;
    this.passes += 1;
    this.undrafted = drafted ? 0 : this.undrafted + 1;
    this.answer.perPass = this.tokens / this.passes;
    if (this.first) return;
    [this.first, this.firstTokens] = [this.last, tokens];
  }

  describe(reason, failure) {
    // the rate leaves out the wait for the first tokens, which a second request finds in the cache
    const { answer } = this;
    const seconds = (this.last - this.first) / 1000;
    if (!reason && this.passes > 1 && seconds > 0) answer.rate = (this.tokens - this.firstTokens) / seconds;
    const idle = answer.kind !== "plain" && this.passes && this.undrafted >= Math.min(RECENT, this.passes);
    answer.figures = [
      `${answer.rate?.toFixed(1) ?? "–"} tokens/s`,
      `${answer.perPass?.toFixed(2) ?? "–"} tokens per pass`,
      ...(idle ? ["drafting is paused: it would not pay now"] : []),
      ...(failure ? [`drafting failed: ${failure}`] : []),
      `${this.tokens} tokens${reason === "length" ? " (the limit)" : ""}`,
      `first after ${this.first ? `${Math.round(this.first - this.began)} ms` : "–"}`,
    ].join(" · ");
  }

  async run(body, signal) {
    current = this;
    this.box.setAttribute("aria-busy", "true");
    follow();
    try {
      await this.stream({ ...body, ...(this.answer.kind === "plain" ? { drafter: "none" } : {}) }, signal);
    } finally {
      this.box.removeAttribute("aria-busy");
      this.draw();
      if (current === this) current = null;
      // screen readers read the complete answer, not each token
      if (this.answer.text) at("status").textContent = `Answer ${TITLES[this.answer.kind]}: ${this.answer.text}`;
    }
  }

  async stream({ drafter, ...body }, signal) {
    this.began = performance.now();
    const foresay = { origins: true, stats: true, ...(drafter ? { drafter } : {}) };
    const sent = JSON.stringify({ ...body, stream: true, foresay });
    const answer = await request("v1/chat/completions", { method: "POST", body: sent, signal });
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) this.take(choice);
    }
  }
}
