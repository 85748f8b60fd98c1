// Texts in, values out: nothing here knows the page. Tested by tests/plugins/web/units.mjs.

/** Splits a stream of server-sent events; `take(piece)` returns the data of the events that are whole. */
export class EventSplitter {
  #rest = "";

  take(piece) {
    const parts = (this.#rest + piece).split("\n\n");
    this.#rest = parts.pop();
    return parts.flatMap((part) => {
      const lines = part.split("\n").filter((line) => line.startsWith("data:"));
      return lines.length ? [lines.map((line) => line.slice(5).trimStart()).join("\n")] : [];
    });
  }
}

const SAMPLE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([A-Za-z_]\w*)="((?:\\.|[^"\\])*)"/g;

/** Prometheus text to {name: [{labels, value}]}. */
export function parseMetrics(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\(.)/g, (_, char) => (char === "n" ? "\n" : char));
    }
    const value = match[3] === "+Inf" ? Infinity : match[3] === "-Inf" ? -Infinity : Number(match[3]);
    (found[match[1]] ??= []).push({ labels, value });
  }
  return found;
}

/** What names begin with, such as `pelton_` or `vllm:`. */
export function prefixOf(metrics) {
  const name = Object.keys(metrics).find((name) => name.endsWith("num_requests_running"));
  return name === undefined ? "" : name.slice(0, -"num_requests_running".length);
}

/** Sum of a family's samples; `labels` that a sample must have; undefined where there is none. */
export function total(metrics, name, labels = {}) {
  const wanted = Object.entries(labels);
  const found = (metrics[name] ?? []).filter((one) => wanted.every(([key, value]) => one.labels[key] === value));
  return found.length ? found.reduce((sum, one) => sum + one.value, 0) : undefined;
}

/** Counts of a histogram by upper bound, each the sum over all series: [[bound, count up to it], ...]. */
export function buckets(metrics, name) {
  const sums = new Map();
  for (const { labels, value } of metrics[`${name}_bucket`] ?? []) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    sums.set(bound, (sums.get(bound) ?? 0) + value);
  }
  return [...sums].sort((a, b) => a[0] - b[0]);
}

/** A quantile of what was observed between two states of a histogram; undefined when nothing was. */
export function quantile(before, after, share) {
  const old = new Map(before);
  const counts = after.map(([bound, count]) => [bound, count - (old.get(bound) ?? 0)]);
  const all = counts.at(-1)?.[1] ?? 0;
  if (all <= 0) return undefined;
  const wanted = share * all;
  let lower = 0;
  let below = 0;
  for (const [bound, count] of counts) {
    if (count >= wanted && count > below) {
      return bound === Infinity ? lower : lower + ((bound - lower) * (wanted - below)) / (count - below);
    }
    lower = bound;
    below = count;
  }
  return undefined;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;

/** A text's paragraphs and fenced code: [{kind: "text" | "code", text, language}]. An open fence reaches to the end. */
export function blocks(text) {
  const found = [];
  let lines = [];
  let fence = null;
  const end = () => {
    const joined = fence ? lines.join("\n") : lines.join("\n").replace(/^\n+|\s+$/g, "");
    if (fence) found.push({ kind: "code", text: joined, language: fence.language });
    else for (const part of joined.split(/\n{2,}/)) if (part) found.push({ kind: "text", text: part });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const match = FENCE.exec(line);
    if (!fence && match) {
      end();
      fence = { mark: match[1], language: match[2] };
    } else if (fence && line.trim().startsWith(fence.mark) && /^[`~]+$/.test(line.trim())) {
      end();
      fence = null;
    } else lines.push(line);
  }
  if (fence || lines.length) end();
  return found;
}

/** A paragraph's parts: [{kind: "plain" | "code" | "bold", text}]. */
export function spans(text) {
  const found = [];
  let at = 0;
  for (const match of text.matchAll(/`([^`\n]+)`|\*\*([^*\n]+)\*\*/g)) {
    if (match.index > at) found.push({ kind: "plain", text: text.slice(at, match.index) });
    found.push(match[1] === undefined ? { kind: "bold", text: match[2] } : { kind: "code", text: match[1] });
    at = match.index + match[0].length;
  }
  if (at < text.length) found.push({ kind: "plain", text: text.slice(at) });
  return found;
}

/** Adds one chunk's delta to an answer {content, reasoning, calls}. */
export function addDelta(answer, delta) {
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (answer.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
}

/** The tools of the field to those of a request. Throws an Error that says what is wrong. */
export function readTools(text) {
  if (!text.trim()) return undefined;
  let given;
  try {
    given = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools are not JSON: ${error.message}`);
  }
  if (!Array.isArray(given)) throw new Error("Tools have to be a JSON list of functions.");
  return given.map((one, index) => {
    const tool = one?.function ? one : { type: "function", function: one };
    if (typeof tool.function?.name !== "string") throw new Error(`Tool ${index + 1} has no name.`);
    return tool;
  });
}

export function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

export function number(value, digits = 3) {
  if (value === undefined || Number.isNaN(value)) return "–";
  if (value >= 10 ** digits || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

export function seconds(value) {
  if (value === undefined) return "–";
  return value < 1 ? `${number(value * 1000)} ms` : `${number(value)} s`;
}

export function percent(value) {
  return value === undefined ? "–" : `${number(value * 100)} %`;
}
