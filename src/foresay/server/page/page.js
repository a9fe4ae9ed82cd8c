"use strict";

const at = (id) => document.getElementById(id);
const RECENT = 8;
let talk = [];
let controller = null;
// the panel being filled, and true while its end is kept in view
let current = null;
let following = true;

function append(kind, parent, name, text = "") {
  const element = document.createElement(kind);
  if (name) element.className = name;
  element.textContent = text;
  parent.append(element);
  return element;
}

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function responseError(answer) {
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

function hiddenPixels(panel) {
  // pixels of a panel below the visible part of the conversation
  return panel.box.getBoundingClientRect().bottom - at("talk").getBoundingClientRect().bottom;
}

function follow() {
  if (current && following) at("talk").scrollTop += Math.max(0, hiddenPixels(current));
}

class Panel {
  constructor(parent, title) {
    this.title = title;
    this.box = append("section", parent, "answer");
    append("h2", this.box, "", title);
    this.text = append("div", this.box, "text");
    this.figures = append("p", this.box, "figures", "waiting");
    this.tokens = this.passes = this.undrafted = 0;
    this.plain = true;
    this.began = this.first = 0;
    this.whole = "";
  }

  take(choice) {
    const extension = choice.foresay ?? {};
    const now = performance.now();
    // the first event contains only the role
    if (choice.delta.content) this.first ||= now;
    for (const [text, origin] of extension.origins ?? []) append("span", this.text, origin, text);
    this.whole += choice.delta.content ?? "";
    this.tokens += extension.tokens ?? 0;
    if (extension.tokens) {
      this.passes += 1;
      this.undrafted = extension.drafted ? 0 : this.undrafted + 1;
    }
    const seconds = (now - this.began) / 1000;
    const rate = seconds > 0 ? (this.tokens / seconds).toFixed(1) : "–";
    const each = this.passes ? (this.tokens / this.passes).toFixed(2) : "–";
    const wait = this.first ? `${Math.round(this.first - this.began)} ms` : "–";
    const idle = !this.plain && this.passes && this.undrafted >= Math.min(RECENT, this.passes);
    const why = idle ? " · drafting is paused: it would not pay now" : "";
    this.figures.textContent = `${rate} tokens/s · ${each} tokens per pass${why} · ${this.tokens} tokens · first after ${wait}`;
    follow();
  }

  async run(messages, drafter, signal) {
    current = this;
    this.plain = drafter === "none";
    this.box.setAttribute("aria-busy", "true");
    follow();
    try {
      await this.stream(messages, drafter, signal);
    } finally {
      this.box.removeAttribute("aria-busy");
      // screen readers read the complete answer, not each token
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
    if (!answer.ok) throw await responseError(answer);
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) this.take(choice);
    }
  }
}

async function send(text) {
  const drafts = at("draft").checked;
  // "New chat" replaces the array while this request runs
  const chat = talk;
  chat.push({ role: "user", content: text });
  append("div", at("talk"), "message", text);
  const answers = append("div", at("talk"), "answers");
  const panels = [[new Panel(answers, drafts ? "with speculation" : "plain"), drafts ? null : "none"]];
  if (at("compare").checked && drafts) panels.push([new Panel(answers, "plain"), "none"]);
  controller = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  at("problem").textContent = "";
  at("status").textContent = "Generating";
  following = true;
  try {
    // one after the other: two at once would slow each other down
    for (const [panel, drafter] of panels) await panel.run([...chat], drafter, controller.signal);
  } catch (error) {
    if (error.name !== "AbortError") at("problem").textContent = error.message;
  } finally {
    for (const [panel] of panels) if (!panel.tokens) panel.figures.textContent = "no tokens generated";
    if (panels[0][0].whole) chat.push({ role: "assistant", content: panels[0][0].whole });
    else chat.pop();
    controller = current = null;
    if (at("status").textContent === "Generating") at("status").textContent = "";
    at("send").disabled = false;
    at("stop").disabled = true;
    at("prompt").focus();
  }
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value.trim();
  if (!text || controller) return;
  at("prompt").value = "";
  send(text);
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("form").requestSubmit();
  }
});
// scrolling up stops following; scrolling back to the end resumes it
at("talk").addEventListener("scroll", () => {
  if (current) following = hiddenPixels(current) < 32;
});
addEventListener("resize", follow);
at("stop").addEventListener("click", () => controller?.abort());
at("clear").addEventListener("click", () => {
  controller?.abort();
  talk = [];
  at("talk").replaceChildren();
  at("prompt").focus();
});

async function showModel() {
  const answer = await fetch("v1/models", { headers: headers() });
  if (!answer.ok) throw await responseError(answer);
  at("model").textContent = (await answer.json()).data[0].id;
}
at("key").addEventListener("change", () => showModel().then(() => (at("problem").textContent = ""), (e) => (at("problem").textContent = e.message)));
showModel().catch((error) => (at("problem").textContent = error.message));
at("prompt").focus();
