// The engine's figures, read from /metrics every two seconds while the page is seen.

import { ask } from "./api.js";
import { buckets, number, parseMetrics, percent, prefixOf, quantile, seconds, total } from "./text.js";

const INTERVAL_MS = 2000;
const WINDOW = 30; // samples that figures "over the last minute" reach back
const CURVE = 60; // points of a curve
const SVG = "http://www.w3.org/2000/svg";

/** Figures of one sample, compared with the first of the last minute. */
export function figures(first, last) {
  const prefix = last.prefix;
  const { metrics } = last;
  const now = (name, labels) => total(metrics, prefix + name, labels);
  const grown = (name, labels) => {
    const after = total(metrics, `${prefix}${name}_total`, labels);
    return after === undefined ? undefined : after - (total(first.metrics, `${prefix}${name}_total`, labels) ?? 0);
  };
  const passed = (last.time - first.time) / 1000;
  const rate = (name) => (passed > 0 ? (grown(name) ?? 0) / passed : undefined);
  const at = (name, share) =>
    quantile(buckets(first.metrics, prefix + name), buckets(metrics, prefix + name), share);
  const labels = metrics[`${prefix}cache_config_info`]?.[0]?.labels ?? {};
  const numBlocks = Number(labels.num_gpu_blocks) || undefined;
  const usage = now("kv_cache_usage_perc");
  const looked = grown("prefix_cache_queries");
  return {
    running: now("num_requests_running"),
    waiting: now("num_requests_waiting"),
    usage,
    numBlocks,
    used: numBlocks === undefined || usage === undefined ? undefined : Math.round(usage * numBlocks),
    hits: looked ? grown("prefix_cache_hits") / looked : undefined,
    looked,
    generated: rate("generation_tokens"),
    prompted: rate("prompt_tokens"),
    ttft: [at("time_to_first_token_seconds", 0.5), at("time_to_first_token_seconds", 0.95)],
    itl: [at("inter_token_latency_seconds", 0.5), at("inter_token_latency_seconds", 0.95)],
    e2e: [at("e2e_request_latency_seconds", 0.5), at("e2e_request_latency_seconds", 0.95)],
    finished: total(metrics, `${prefix}request_success_total`),
    failed: total(metrics, `${prefix}request_success_total`, { finished_reason: "error" }),
    preemptions: total(metrics, `${prefix}num_preemptions_total`),
    restarts: total(metrics, `${prefix}engine_restarts_total`),
  };
}

// title, big figure, what stands below it, value of the curve
const TILES = [
  ["Requests running", (f) => number(f.running), (f) => `${number(f.waiting)} wait`, (f) => f.running],
  ["KV blocks in use", (f) => percent(f.usage), (f) => `${number(f.used)} of ${number(f.numBlocks)}`, (f) => f.usage],
  ["Tokens a second", (f) => number(f.generated), (f) => `and ${number(f.prompted)} of prompts`, (f) => f.rate],
  ["Prefix cache hits", (f) => percent(f.hits), (f) => `of ${number(f.looked ?? 0)} tokens looked up`, (f) => f.hits],
  ["Time to first token", (f) => seconds(f.ttft[0]), (f) => `95 %: ${seconds(f.ttft[1])}`, (f) => f.ttft[0]],
  ["Between tokens", (f) => seconds(f.itl[0]), (f) => `95 %: ${seconds(f.itl[1])}`, (f) => f.itl[0]],
  ["Whole request", (f) => seconds(f.e2e[0]), (f) => `95 %: ${seconds(f.e2e[1])}`, (f) => f.e2e[0]],
  [
    "Requests finished",
    (f) => number(f.finished),
    (f) => `${number(f.failed ?? 0)} failed, ${number(f.preemptions ?? 0)} preempted`,
    (f) => f.finished,
  ],
];

class Tile {
  #values = [];

  constructor([title, value, more, curve]) {
    Object.assign(this, { value, more, curve, title });
    this.element = document.createElement("div");
    this.element.className = "tile";
    const [dt, dd, small] = ["dt", "dd", "dd"].map((tag) => document.createElement(tag));
    dt.textContent = title;
    dd.className = "value";
    small.className = "more";
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("class", "curve");
    this.svg.setAttribute("viewBox", "0 0 100 34");
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("aria-hidden", "true"); // the figures above say it
    this.area = document.createElementNS(SVG, "path");
    this.area.setAttribute("class", "area");
    this.line = document.createElementNS(SVG, "path");
    this.line.setAttribute("class", "line");
    this.svg.append(this.area, this.line);
    const last = document.createElement("dd");
    last.append(this.svg);
    this.element.append(dt, dd, small, last);
    this.big = dd;
    this.small = small;
  }

  show(found) {
    this.big.textContent = this.value(found);
    this.small.textContent = this.more(found);
    this.#values.push(this.curve(found) ?? 0);
    if (this.#values.length > CURVE) this.#values.shift();
    const most = Math.max(...this.#values, 1e-9);
    const start = 100 - ((this.#values.length - 1) * 100) / (CURVE - 1);
    const points = this.#values.map((value, index) => {
      const x = start + (index * 100) / (CURVE - 1);
      return `${x.toFixed(2)} ${(32 - (29 * value) / most).toFixed(2)}`;
    });
    this.line.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M${start.toFixed(2)} 33L${points.join("L")}L100 33Z`);
  }
}

export class Live {
  #samples = [];
  #tiles = TILES.map((one) => new Tile(one));
  #isPaused = false;

  constructor() {
    document.getElementById("tiles").append(...this.#tiles.map((tile) => tile.element));
    const pause = document.getElementById("pause");
    pause.addEventListener("click", () => {
      this.#isPaused = !this.#isPaused;
      pause.setAttribute("aria-pressed", String(this.#isPaused));
    });
    setInterval(() => this.look(), INTERVAL_MS);
    document.addEventListener("visibilitychange", () => this.look());
  }

  async look() {
    if (this.#isPaused || document.hidden) return;
    const note = document.getElementById("live-note");
    try {
      const metrics = parseMetrics(await (await ask("metrics", { isQuiet: true })).text());
      const sample = { metrics, prefix: prefixOf(metrics), time: performance.now() };
      const before = this.#samples.at(-1);
      // After a restart of the server counters begin again.
      const name = `${sample.prefix}generation_tokens_total`;
      if (before && (total(metrics, name) ?? 0) < (total(before.metrics, name) ?? 0)) this.#samples = [];
      this.#samples.push(sample);
      if (this.#samples.length > WINDOW + 1) this.#samples.shift();
      const found = figures(this.#samples[0], sample);
      found.rate = before ? figures(before, sample).generated : undefined;
      this.#tiles.forEach((tile) => tile.show(found));
      note.textContent = "Figures of all requests to this server, over the last minute.";
    } catch (error) {
      note.textContent = error.status === 401 ? "Figures need the API key." : "The server does not answer.";
    }
  }
}
