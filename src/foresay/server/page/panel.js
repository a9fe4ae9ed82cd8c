"use strict";
// One answer: its request, its stream, how it is shown, and its replay.

const RECENT = 8;
// milliseconds between two drawings of a growing answer; more where drawing takes long
const FRAME = 60;
const TITLES = { speculation: "with speculation", plain: "plain" };
const ORIGINS = ["draft", "residual", "bonus"];
// the panel being filled, and true while its end is kept in view
let current = null;
let following = true;

async function request(path, options = {}) {
  const key = at("key").value;
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { headers, ...options }).catch((error) => {
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

// pixels of a panel below the visible part of the conversation
const hiddenPixels = ({ box }) => box.getBoundingClientRect().bottom - at("talk").getBoundingClientRect().bottom;

function follow() {
  if (current && following) at("talk").scrollTop += Math.max(0, hiddenPixels(current));
}

function newAnswer(kind) {
  // tokens, passes and seconds are sums over the request and those that continued it; the first pass of each is not timed
  return { kind, text: "", reasoning: "", pieces: [], tokens: 0, untimed: 0, passes: 0, seconds: 0, wait: 0, reason: "", note: "",
    spread: 1, exact: true };
}

const titleOfAnswer = ({ kind }, drafter) => (kind === "speculation" && drafter ? `with ${drafter}` : TITLES[kind]);
const isKept = ({ reason, pieces }) => reason !== "" || pieces.length > 0;
const perPass = ({ tokens, passes }) => (passes ? tokens / passes : null);
const rate = ({ tokens, untimed, seconds }) => (tokens > untimed && seconds > 0 ? (tokens - untimed) / seconds : null);

function described(answer) {
  // the rate leaves out the wait for the first tokens, which a second request finds in the cache
  return [
    `${rate(answer)?.toFixed(1) ?? "–"} tokens/s`,
    `${perPass(answer)?.toFixed(2) ?? "–"} tokens per pass`,
    `${answer.tokens} tokens${answer.reason === "length" ? " (the limit)" : ""}`,
    `${answer.seconds.toFixed(2)} s`,
    `first after ${answer.passes ? `${Math.round(answer.wait)} ms` : "–"}`,
    ...(answer.note ? [answer.note] : []),
  ];
}

function spreadOf(passes) {
  // the relative difference of the two halves of a run: the noise of its speed
  const speed = (part) => part.slice(1).reduce((sum, one) => sum + one.tokens, 0) / (part.at(-1).ms - part[0].ms);
  const middle = passes.length >> 1;
  const found = passes.length < RECENT ? 1 : Math.abs(speed(passes.slice(0, middle + 1)) / speed(passes.slice(middle)) - 1);
  return Number.isFinite(found) ? found : 1;
}

class Panel {
  constructor(parent, answer, turn = {}) {
    this.begin(answer);
    this.box = append("section", parent, "answer");
    this.title = titleOfAnswer(answer, turn.drafter);
    this.state = made("span", [], { className: "quiet" });
    append("h2", this.box, "", [this.title, turn.model].filter(Boolean).join(" · ")).append(this.state);
    this.bar = made("progress", [], { hidden: true, max: 1, value: 0, ariaLabel: `Tokens ${this.title}` });
    this.reasoning = append("details", this.box, "reasoning");
    append("summary", this.reasoning, "", "Reasoning");
    append("div", this.reasoning, "raw");
    this.text = append("div", this.box, "text");
    this.figures = append("p", this.box, "figures");
    this.box.append(this.bar);
    this.timer = 0;
    this.redraw();
  }

  begin(answer) {
    this.answer = answer;
    // events with their milliseconds since the first pass, for a replay
    this.recorded = [];
    [this.first, this.undrafted, this.before] = [0, 0, answer.seconds];
  }

  redraw() {
    this.text.replaceChildren();
    shown.delete(this.text);
    this.drawn = 0;
    this.draw();
  }

  draw() {
    clearTimeout(this.timer);
    const [began, { text, reasoning, pieces, tokens }] = [performance.now(), this.answer];
    const byOrigin = at("origins").checked;
    this.text.classList.toggle("raw", byOrigin);
    this.reasoning.hidden = byOrigin || !reasoning;
    this.reasoning.lastChild.textContent = reasoning;
    if (!byOrigin) showMarkdown(this.text, text);
    else for (const [piece, origin] of pieces.slice(this.drawn)) append("span", this.text, origin, piece);
    this.drawn = pieces.length;
    this.figures.replaceChildren(...described(this.answer).flatMap((one, index) => {
      const [, number, words] = /^([\d.–]*)(.*)$/.exec(one);
      return [index ? " · " : "", made("span", [made("b", [number]), words])];
    }));
    this.bar.value = tokens;
    // during a race each text has a part of the height, so that both are seen
    this.text.scrollTop = this.text.scrollHeight;
    follow();
    // a long answer must not slow down the server that shares its processor
    this.timer = 0;
    this.pause = Math.max(FRAME, 10 * (performance.now() - began));
  }

  take(choice, now = performance.now()) {
    const { answer, recorded } = this;
    const { origins, tokens, drafted, draft_error: failure, exact = true } = choice.foresay ?? {};
    answer.text += choice.delta?.content ?? choice.text ?? "";
    answer.reasoning += choice.delta?.reasoning_content ?? "";
    answer.pieces.push(...(origins ?? []));
    answer.reason = choice.finish_reason ?? answer.reason;
    answer.exact &&= exact;
    if (origins) this.count(tokens, drafted, now);
    recorded.push({ choice, tokens: origins ? tokens : 0, ms: this.first ? now - this.first : 0 });
    const isIdle = answer.kind !== "plain" && answer.passes && this.undrafted >= Math.min(RECENT, answer.passes);
    answer.note = failure ? `drafting failed: ${failure}` : isIdle ? "drafting is paused: it would not pay now" : "";
    if (choice.finish_reason) answer.spread = spreadOf(recorded.filter((one) => one.tokens));
    this.timer ||= setTimeout(() => this.draw(), this.pause);
  }

  count(tokens, drafted, now) {
    const { answer } = this;
    answer.tokens += tokens;
    answer.passes += 1;
    this.undrafted = drafted ? 0 : this.undrafted + 1;
    if (!this.first) {
      // from here on there is something to keep
      save();
      this.first = now;
      answer.untimed += tokens;
      answer.wait ||= now - this.began;
    }
    answer.seconds = this.before + (now - this.first) / 1000;
  }

  async replay(signal, most) {
    // the recorded events at their recorded times, from the first token on
    const { recorded, answer } = this;
    const began = performance.now();
    current = this;
    Object.assign(this.bar, { hidden: false, max: most });
    this.state.textContent = " · replayed as it was timed";
    this.begin({ ...newAnswer(answer.kind), wait: answer.wait });
    this.redraw();
    for (let index = 0; index < recorded.length && !signal.aborted; ) {
      await new Promise((done) => setTimeout(done, FRAME / 2));
      // any clock but 0 will do: its differences are counted
      for (; recorded[index]?.ms <= performance.now() - began; index++) this.take(recorded[index].choice, 1 + recorded[index].ms);
    }
    [this.answer, this.recorded, this.state.textContent] = [answer, recorded, ""];
    this.redraw();
  }

  async run(send, signal) {
    current = this;
    this.begin(this.answer);
    this.answer.reason = "";
    this.box.setAttribute("aria-busy", "true");
    this.state.textContent = " · decoding now";
    follow();
    try {
      this.began = performance.now();
      for await (const event of events(await send(signal))) {
        if (event.error) throw new Error(event.error.message);
        for (const choice of event.choices) this.take(choice);
      }
    } finally {
      this.box.removeAttribute("aria-busy");
      this.state.textContent = "";
      this.draw();
      if (current === this) current = null;
      // screen readers read the complete answer, not each token
      if (this.answer.text) at("status").textContent = `Answer ${this.title}: ${this.answer.text}`;
    }
  }
}
