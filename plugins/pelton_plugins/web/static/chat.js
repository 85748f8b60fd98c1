// The conversation: what was said, the answer that comes, and the request for the next.
// Text of models gets into the page as text nodes alone.

import { ask } from "./api.js";
import { EventSplitter, addDelta, blocks, number, pretty, readTools, seconds, spans } from "./text.js";

const at = (id) => document.getElementById(id);
const log = at("log");
const prompt = at("prompt");
const sampling = at("sampling");
const NUMBERS = [
  "temperature", "max_completion_tokens", "top_p", "top_k", "min_p", "seed", "presence_penalty", "repetition_penalty",
];

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

/** One message of the log; screen readers hear whose it is. */
function article(kind, name) {
  const element = make("article", `message ${kind}`);
  element.setAttribute("aria-label", name);
  element.append(make("h3", "", name));
  return element;
}

function blockElement(block) {
  if (block.kind === "code") {
    const pre = make("pre");
    pre.tabIndex = 0; // it may scroll
    pre.setAttribute("aria-label", block.language ? `Code, ${block.language}` : "Code");
    pre.setAttribute("role", "region");
    pre.append(make("code", "", block.text));
    return pre;
  }
  const paragraph = make("p");
  for (const span of spans(block.text)) {
    const tag = { code: "code", bold: "strong" }[span.kind];
    paragraph.append(tag ? make(tag, "", span.text) : document.createTextNode(span.text));
  }
  return paragraph;
}

/** Shows a text that grows: blocks that did not change keep their elements. */
class TextView {
  #shown = [];

  constructor() {
    this.element = make("div", "text");
  }

  show(text) {
    const wanted = blocks(text);
    const keys = wanted.map((block) => `${block.kind} ${block.text}`);
    let same = 0;
    while (same < keys.length && this.#shown[same] === keys[same]) same += 1;
    while (this.element.children.length > same) this.element.lastChild.remove();
    for (const block of wanted.slice(same)) this.element.append(blockElement(block));
    this.#shown = keys;
  }
}

/** One answer in the page: reasoning folded, text, tool calls, and how long it took. */
class AnswerView {
  #text = new TextView();
  #reasoning = null;
  #calls = [];

  constructor(name) {
    this.element = article("assistant busy", name);
    this.element.append(this.#text.element);
    this.facts = make("p", "facts");
    this.element.append(this.facts);
  }

  show(answer) {
    if (answer.reasoning && !this.#reasoning) {
      const fold = make("details", "fold");
      this.#reasoning = make("p");
      fold.append(make("summary", "", "Reasoning"), this.#reasoning);
      this.#text.element.before(fold);
    }
    if (this.#reasoning) this.#reasoning.textContent = answer.reasoning;
    this.#text.show(answer.content);
    answer.calls.forEach((call, index) => {
      if (!this.#calls[index]) {
        const card = make("section", "call");
        const title = make("h4");
        const values = make("pre", "code");
        card.append(title, values);
        this.facts.before(card);
        this.#calls[index] = { card, title, values };
      }
      this.#calls[index].title.textContent = `Calls ${call.name}`;
      this.#calls[index].values.textContent = pretty(call.arguments);
    });
  }

  /** A field for each call's result; `send(results)` once they are given. */
  askForResults(calls, send) {
    const form = make("form", "results");
    const fields = calls.map((call, index) => {
      const field = make("textarea");
      field.rows = 2;
      field.id = `result-${call.id || index}`;
      const label = make("label", "", `Result of ${call.name}`);
      label.htmlFor = field.id;
      const row = make("div", "field wide");
      row.append(label, field);
      form.append(row);
      return field;
    });
    const button = make("button", "strong", "Send results");
    form.append(button);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.remove();
      send(fields.map((field) => field.value));
    });
    this.facts.before(form);
    fields[0]?.focus();
  }

  end(facts) {
    this.element.classList.remove("busy");
    this.facts.textContent = facts;
  }
}

export class Chat {
  #messages = [];
  #views = []; // of each message, so that an answer can be made again
  #stop = null;

  constructor(model) {
    this.model = model;
    at("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#stop) this.#stop.abort();
    });
    at("stop").addEventListener("click", () => this.#stop?.abort());
    at("again").addEventListener("click", () => this.#again());
    at("clear").addEventListener("click", () => this.#clear());
  }

  #add(message, view) {
    at("empty")?.remove();
    this.#messages.push(message);
    this.#views.push(view);
    log.append(view);
    log.scrollTop = log.scrollHeight;
  }

  #send() {
    const text = prompt.value.trim();
    if (!text || this.#stop) return;
    prompt.value = "";
    this.#addUser(text);
    this.#answer();
  }

  #addUser(text) {
    const view = article("user", "You");
    const shown = new TextView();
    shown.show(text);
    view.append(shown.element);
    this.#add({ role: "user", content: text }, view);
  }

  #again() {
    if (this.#stop) return;
    while (this.#messages.length && this.#messages.at(-1).role !== "user") {
      this.#messages.pop();
      this.#views.pop().remove();
    }
    this.#answer();
  }

  #clear() {
    this.#stop?.abort();
    this.#views.splice(0).forEach((view) => view.remove());
    this.#messages = [];
    this.#problem("");
    at("progress").textContent = "";
    this.#enable();
    prompt.focus();
  }

  #problem(text) {
    at("problem").textContent = text;
    at("problem").hidden = !text;
  }

  #enable() {
    const isBusy = this.#stop !== null;
    const hadFocus = document.activeElement === at(isBusy ? "send" : "stop");
    at("send").hidden = isBusy;
    at("stop").hidden = !isBusy;
    if (hadFocus) at(isBusy ? "stop" : "send").focus();
    at("again").disabled = isBusy || !this.#messages.length;
    at("clear").disabled = !this.#messages.length;
    log.setAttribute("aria-busy", String(isBusy)); // read out when it is whole
  }

  #body() {
    if (!sampling.checkValidity()) {
      at("settings").open = true;
      sampling.reportValidity();
      throw new Error("A sampling setting is out of its bounds.");
    }
    const body = { model: this.model(), stream: true, stream_options: { include_usage: true } };
    const system = sampling.elements.system.value.trim();
    body.messages = [...(system ? [{ role: "system", content: system }] : []), ...this.#messages];
    for (const name of NUMBERS) {
      const value = sampling.elements[name].value;
      if (value !== "") body[name] = Number(value);
    }
    const stops = sampling.elements.stop.value.split("\n").filter(Boolean);
    if (stops.length) body.stop = stops;
    const tools = readTools(sampling.elements.tools.value);
    if (tools) body.tools = tools;
    return body;
  }

  async #answer() {
    this.#problem("");
    let body;
    try {
      body = this.#body();
    } catch (error) {
      this.#problem(error.message);
      return;
    }
    const view = new AnswerView(body.model || "Answer");
    const answer = { content: "", reasoning: "", calls: [] };
    const times = { start: performance.now(), first: 0 };
    const seen = { usage: null, reason: null };
    this.#stop = new AbortController();
    this.#enable();
    at("progress").textContent = "Waiting for the first token";
    log.append(view.element);
    let isWaiting = false;
    const show = () => {
      if (isWaiting) return;
      isWaiting = true;
      requestAnimationFrame(() => {
        isWaiting = false;
        const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
        view.show(answer);
        if (isAtEnd) log.scrollTop = log.scrollHeight;
      });
    };
    let failure = "";
    let isStopped = false;
    try {
      await this.#read(body, (chunk) => {
        if (chunk.error) throw new Error(chunk.error.message);
        seen.usage = chunk.usage ?? seen.usage;
        for (const choice of chunk.choices ?? []) {
          const { delta } = choice;
          const says = delta.content || delta.reasoning || delta.reasoning_content || delta.tool_calls;
          if (says && !times.first) {
            times.first = performance.now();
            at("progress").textContent = "Answering";
          }
          addDelta(answer, delta);
          seen.reason = choice.finish_reason ?? seen.reason;
        }
        show();
      });
    } catch (error) {
      isStopped = error.name === "AbortError";
      if (!isStopped) failure = error.message || String(error);
    }
    this.#stop = null;
    view.show(answer);
    const facts = this.#facts(times, seen, isStopped);
    view.end(facts);
    at("progress").textContent = isStopped ? "Stopped" : failure ? "Failed" : "Answer complete";
    this.#keep(answer, view, seen);
    if (failure) this.#problem(failure);
    this.#enable();
  }

  #keep(answer, view, seen) {
    const calls = answer.calls.filter(Boolean);
    if (!answer.content && !answer.reasoning && !calls.length) {
      view.element.remove();
      return;
    }
    const message = { role: "assistant", content: answer.content || null };
    if (calls.length) {
      message.tool_calls = calls.map((call) => ({
        id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
      }));
    } else message.content = answer.content;
    this.#add(message, view.element);
    if (calls.length && seen.reason === "tool_calls") {
      view.askForResults(calls, (results) => {
        results.forEach((result, index) => {
          const shown = article("user", `Result of ${calls[index].name}`);
          const text = new TextView();
          text.show(result);
          shown.append(text.element);
          this.#add({ role: "tool", tool_call_id: calls[index].id, content: result }, shown);
        });
        this.#answer();
      });
    }
  }

  #facts(times, seen, isStopped) {
    const end = performance.now();
    const facts = [];
    if (seen.usage) {
      const { completion_tokens: tokens, prompt_tokens: prompted, prompt_tokens_details: details } = seen.usage;
      facts.push(`${number(tokens)} tokens after ${number(prompted)}`);
      if (details?.cached_tokens) facts.push(`${number(details.cached_tokens)} of them cached`);
      if (times.first && tokens > 1) facts.push(`${number((tokens - 1) / ((end - times.first) / 1000))} tokens/s`);
    }
    if (times.first) facts.push(`first after ${seconds((times.first - times.start) / 1000)}`);
    if (isStopped) facts.push("stopped");
    else if (seen.reason === "length") facts.push("cut at the most tokens");
    return facts.join(" · ");
  }

  async #read(body, onChunk) {
    const answer = await ask("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal: this.#stop.signal,
    });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const splitter = new EventSplitter();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The connection ended before the answer did.");
      for (const data of splitter.take(value)) {
        if (data === "[DONE]") return;
        onChunk(JSON.parse(data));
      }
    }
  }
}
