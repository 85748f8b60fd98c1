// Functions of text.js and live.js. Run by test_page.py: node units.mjs FOLDER

import assert from "node:assert/strict";

const folder = process.argv[2];
globalThis.document = { getElementById: () => ({ addEventListener() {}, textContent: "" }) };
const text = await import(`${folder}/text.mjs`);
const { figures } = await import(`${folder}/live.mjs`);

// Events come in any pieces; comments and names are left out.
for (const size of [1, 2, 3, 7, 1000]) {
  const stream = 'data: {"a": 1}\n\n: keep-alive\n\nevent: x\ndata: b\ndata: c\n\ndata: [DONE]\n\n';
  const splitter = new text.EventSplitter();
  const found = [];
  for (let start = 0; start < stream.length; start += size) found.push(...splitter.take(stream.slice(start, start + size)));
  assert.deepEqual(found, ['{"a": 1}', "b\nc", "[DONE]"]);
}

const metrics = text.parseMetrics(
  [
    "# HELP pelton_num_requests_running Requests.",
    'pelton_num_requests_running{engine="0",model_name="a \\"b\\" {x}"} 3',
    'pelton_num_requests_running{engine="1",model_name="m"} 4',
    "up 1.5e3",
    'h_bucket{le="0.1"} 1',
    'h_bucket{le="1.0"} 5',
    'h_bucket{le="+Inf"} 6',
  ].join("\n"),
);
assert.equal(metrics.pelton_num_requests_running[0].labels.model_name, 'a "b" {x}');
assert.equal(text.prefixOf(metrics), "pelton_");
assert.equal(text.prefixOf(text.parseMetrics('vllm:num_requests_running{engine="0"} 1')), "vllm:");
assert.equal(text.total(metrics, "pelton_num_requests_running"), 7);
assert.equal(text.total(metrics, "pelton_num_requests_running", { engine: "1" }), 4);
assert.equal(text.total(metrics, "none"), undefined);
assert.equal(text.total(metrics, "up"), 1500);
const after = text.buckets(metrics, "h");
assert.deepEqual(after, [[0.1, 1], [1, 5], [Infinity, 6]]);
assert.equal(text.quantile([], after, 0.5), 0.1 + 0.9 * 0.5);
assert.equal(text.quantile([], after, 1), 1); // the last bucket has no end
assert.equal(text.quantile(after, after, 0.5), undefined);
assert.equal(text.quantile([[0.1, 1], [1, 1], [Infinity, 1]], after, 0.5), 0.1 + (0.9 * 2.5) / 4);

assert.deepEqual(text.blocks("a\nb\n\nc\n```py\nx = 1\n\n```\nd"), [
  { kind: "text", text: "a\nb" },
  { kind: "text", text: "c" },
  { kind: "code", text: "x = 1\n", language: "py" },
  { kind: "text", text: "d" },
]);
assert.deepEqual(text.blocks("```\n<b>"), [{ kind: "code", text: "<b>", language: "" }]);
assert.deepEqual(text.blocks(""), []);
assert.deepEqual(text.spans("a `b` **c** <i>"), [
  { kind: "plain", text: "a " },
  { kind: "code", text: "b" },
  { kind: "plain", text: " " },
  { kind: "bold", text: "c" },
  { kind: "plain", text: " <i>" },
]);

const answer = { content: "", reasoning: "", calls: [] };
text.addDelta(answer, { role: "assistant", content: "" });
text.addDelta(answer, { reasoning: "so", reasoning_content: "so" });
text.addDelta(answer, { tool_calls: [{ index: 0, id: "c1", function: { name: "f", arguments: "" } }] });
text.addDelta(answer, { tool_calls: [{ index: 0, function: { arguments: '{"x"' } }, { index: 1, id: "c2", function: { name: "g" } }] });
text.addDelta(answer, { content: "hi", tool_calls: [{ index: 0, function: { arguments: ": 1}" } }] });
assert.deepEqual(answer, {
  content: "hi",
  reasoning: "so",
  calls: [{ id: "c1", name: "f", arguments: '{"x": 1}' }, { id: "c2", name: "g", arguments: "" }],
});
assert.equal(text.pretty('{"x":1}'), '{\n  "x": 1\n}');
assert.equal(text.pretty('{"x":'), '{"x":');
assert.equal(text.readTools("  "), undefined);
assert.deepEqual(text.readTools('[{"name": "f"}]'), [{ type: "function", function: { name: "f" } }]);
for (const [given, message] of [["{", /not JSON/], ["{}", /JSON list/], ['[{"x": 1}]', /Tool 1 has no name/]]) {
  assert.throws(() => text.readTools(given), message);
}
assert.deepEqual([0, 3, 0.1234, 12345.6, undefined].map((one) => text.number(one)), ["0", "3", "0.123", "12,346", "–"]);
assert.deepEqual([0.0052, 1.5, undefined].map(text.seconds), ["5.2 ms", "1.5 s", "–"]);
assert.equal(text.percent(0.25), "25 %");

const sample = (time, lines) => ({ time, prefix: "p_", metrics: text.parseMetrics(lines.join("\n")) });
const first = sample(0, ["p_generation_tokens_total 10", "p_prefix_cache_queries_total 100", "p_prefix_cache_hits_total 0"]);
const last = sample(2000, [
  "p_generation_tokens_total 110", "p_prefix_cache_queries_total 200", "p_prefix_cache_hits_total 25",
  "p_kv_cache_usage_perc 0.5", 'p_cache_config_info{num_gpu_blocks="64"} 1', "p_num_requests_running 2",
  'p_time_to_first_token_seconds_bucket{le="0.5"} 4', 'p_time_to_first_token_seconds_bucket{le="+Inf"} 4',
]);
const found = figures(first, last);
assert.deepEqual(
  [found.generated, found.hits, found.used, found.running, found.ttft[0], found.itl[0]],
  [50, 0.25, 32, 2, 0.25, undefined],
);
console.log("ok");
