"use strict";

const at = (id) => document.getElementById(id);
const RECENT = 8;
let talk = [];
let going = null;
// the panel that grows, and whether its end is kept in view
let growing = null;
let following = true;

function made(kind, parent, name, text = "") {
  const one = document.createElement(kind);
  if (name) one.className = name;
  one.textContent = text;
  parent.append(one);
  return one;
}

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function refused(answer) {
  if (answer.status === 401) at("keyed").hidden = false;
  const body = await answer.json().catch(() => null);
  return new Error(body?.error?.message ?? `the server answered ${answer.status}`);
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (left + value).split("\n\n");
    left = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function hidden(panel) {
  // pixels of a panel below what is visible of the conversation
  return panel.box.getBoundingClientRect().bottom - at("talk").getBoundingClientRect().bottom;
}

function follow() {
  if (growing && following) at("talk").scrollTop += Math.max(0, hidden(growing));
}

class Panel {
  constructor(parent, title) {
    this.title = title;
    this.box = made("section", parent, "answer");
    made("h2", this.box, "", title);
    this.text = made("div", this.box, "text");
    this.figures = made("p", this.box, "figures", "waiting");
    this.tokens = this.passes = this.undrafted = 0;
    this.plain = true;
    this.began = this.first = 0;
    this.whole = "";
  }

  take(choice) {
    const told = choice.foresay ?? {};
    const now = performance.now();
    // the first event only says who speaks
    if (choice.delta.content) this.first ||= now;
    for (const [text, origin] of told.origins ?? []) made("span", this.text, origin, text);
    this.whole += choice.delta.content ?? "";
    this.tokens += told.tokens ?? 0;
    if (told.tokens) {
      this.passes += 1;
      this.undrafted = told.drafted ? 0 : this.undrafted + 1;
    }
    const seconds = (now - this.began) / 1000;
    const rate = seconds > 0 ? (this.tokens / seconds).toFixed(1) : "–";
    const each = this.passes ? (this.tokens / this.passes).toFixed(2) : "–";
    const wait = this.first ? `${Math.round(this.first - this.began)} ms` : "–";
    const idle = !this.plain && this.passes && this.undrafted >= Math.min(RECENT, this.passes);
    const why = idle ? " · not drafting just now, since it would not pay" : "";
    this.figures.textContent = `${rate} tokens/s · ${each} tokens per pass${why} · ${this.tokens} tokens · first after ${wait}`;
    follow();
  }

  async run(messages, drafter, signal) {
    growing = this;
    this.plain = drafter === "none";
    this.box.setAttribute("aria-busy", "true");
    follow();
    try {
      await this.stream(messages, drafter, signal);
    } finally {
      this.box.removeAttribute("aria-busy");
      // read out once it is complete, not token by token
      if (this.whole) at("status").textContent = `Answer ${this.title}: ${this.whole}`;
    }
  }

  async stream(messages, drafter, signal) {
    this.began = performance.now();
    const body = {
      messages,
      stream: true,
      temperature: Number(at("temperature").value),
      max_tokens: Number(at("tokens").value),
      foresay: { origins: true, ...(drafter ? { drafter } : {}) },
    };
    const answer = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
    if (!answer.ok) throw await refused(answer);
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) this.take(choice);
    }
  }
}

async function ask(text) {
  const drafts = at("draft").checked;
  // what a new chat begins is another
  const chat = talk;
  chat.push({ role: "user", content: text });
  made("div", at("talk"), "said", text);
  const answers = made("div", at("talk"), "answers");
  const panels = [[new Panel(answers, drafts ? "with speculation" : "plain"), drafts ? null : "none"]];
  if (at("beside").checked && drafts) panels.push([new Panel(answers, "plain"), "none"]);
  going = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  at("problem").textContent = "";
  at("status").textContent = "Generating";
  following = true;
  try {
    // one after the other: at the same time on one machine neither would show its speed
    for (const [panel, drafter] of panels) await panel.run([...chat], drafter, going.signal);
  } catch (error) {
    if (error.name !== "AbortError") at("problem").textContent = error.message;
  } finally {
    for (const [panel] of panels) if (!panel.tokens) panel.figures.textContent = "nothing written";
    if (panels[0][0].whole) chat.push({ role: "assistant", content: panels[0][0].whole });
    else chat.pop();
    going = growing = null;
    if (at("status").textContent === "Generating") at("status").textContent = "";
    at("send").disabled = false;
    at("stop").disabled = true;
    at("prompt").focus();
  }
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value.trim();
  if (!text || going) return;
  at("prompt").value = "";
  ask(text);
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("form").requestSubmit();
  }
});
// a reader who scrolls up stays there; at the end again, the view follows
at("talk").addEventListener("scroll", () => {
  if (growing) following = hidden(growing) < 32;
});
addEventListener("resize", follow);
at("stop").addEventListener("click", () => going?.abort());
at("clear").addEventListener("click", () => {
  going?.abort();
  talk = [];
  at("talk").replaceChildren();
  at("prompt").focus();
});

async function greet() {
  const answer = await fetch("v1/models", { headers: headers() });
  if (!answer.ok) throw await refused(answer);
  at("model").textContent = (await answer.json()).data[0].id;
}
at("key").addEventListener("change", () => greet().then(() => (at("problem").textContent = ""), (e) => (at("problem").textContent = e.message)));
greet().catch((error) => (at("problem").textContent = error.message));
at("prompt").focus();
