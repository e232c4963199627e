// One request on a time line, as /v1/requests/{id} tells it.

import { getJson, told } from "../api.js";
import { button, element, svg, svgTitle } from "../dom.js";

const PHASES = [
  ["queue", "waits at the router"],
  ["engine_queue", "waits at the replica"],
  ["prefill", "computes the prompt"],
  ["decode", "writes"],
];
const WIDTH = 1000;
const milliseconds = (value) => (value === null ? "–" : `${value.toFixed(value < 10 ? 1 : 0)} ms`);

export class Timeline {
  constructor(section) {
    this.input = element("input", {
      placeholder: "The x-request-id of an answer",
      aria: { label: "Request id" },
      on: { keydown: (event) => event.key === "Enter" && this.#go() },
    });
    this.found = element("div");
    const row = element("div", { className: "row" }, this.input, button("Show", () => this.#go()));
    section.append(element("div", { className: "column" }, row, this.found));
  }

  show(id) {
    if (!id) return;
    this.input.value = decodeURIComponent(id);
    this.#load();
  }

  focus() {
    this.input.focus();
  }

  hide() {
    clearTimeout(this.again);
  }

  #go() {
    const id = this.input.value.trim();
    if (!id) return;
    const wanted = `#request=${encodeURIComponent(id)}`;
    if (location.hash === wanted) this.#load();
    else location.hash = wanted;
  }

  async #load() {
    clearTimeout(this.again);
    try {
      const { parts } = await getJson(`v1/requests/${encodeURIComponent(this.input.value.trim())}`);
      this.found.replaceChildren(...parts.map(showPart));
      const ended = parts.every(({ state }) => state === "finished" || state === "failed");
      if (!ended) this.again = setTimeout(() => this.#load(), 1000);
    } catch (error) {
      this.found.replaceChildren(element("p", { className: "failure" }, told(error)));
    }
  }
}

/** One prompt of a request: a bar of its phases, and where it was. */
function showPart(part) {
  const { timing_ms: timing, route, moves } = part;
  const total = Math.max(timing.total ?? 0, 0.001);
  const at = (value) => (WIDTH * Math.min(value, total)) / total;
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} 64`, preserveAspectRatio: "none", class: "timeline", role: "img" });
  let begun = 0;
  for (const [name, what] of PHASES) {
    const length = timing[name];
    if (length === null || length === undefined) continue;
    const from = name === "decode" ? timing.first_token : begun;
    const title = svgTitle(`${what}: ${milliseconds(length)}`);
    const width = Math.max(1, at(from + length) - at(from));
    drawing.append(svg("rect", { x: at(from), y: 8, width, height: 28, class: `phase ${name}` }, title));
    begun = from + length;
  }
  for (const { at_ms: when, replica, reason } of route)
    drawing.append(mark(at(when), "placed", `${milliseconds(when)}: to ${replica} (${reason})`));
  for (const { at_ms: when, from, why } of moves)
    drawing.append(mark(at(when), "moved", `${milliseconds(when)}: leaves ${from}: ${why}`));
  const facts = [
    part.model,
    part.error ? `${part.state}: ${part.error}` : part.state,
    `${part.prompt_tokens} prompt tokens, ${part.cached_tokens} of them cached`,
    `${part.output_tokens} output tokens`,
    `received ${new Date(1000 * part.received_at).toLocaleTimeString()} by ${part.router}`,
  ];
  if (part.adapter) facts.push(`adapter ${part.adapter.name}, waited ${milliseconds(part.adapter.load_ms)}`);
  const drafts = acceptedRuns(part.accepted_runs, part.output_tokens);
  const legend = PHASES.map(([name, what]) =>
    element("span", {}, element("i", { className: `phase ${name}` }), `${what} ${milliseconds(timing[name] ?? null)}`),
  );
  return element(
    "article",
    { className: "tool" },
    element("p", { className: "figures" }, facts.join(" · ")),
    drawing,
    element("p", { className: "legend" }, ...legend, `total ${milliseconds(timing.total)}`),
    ...drafts,
    steps(route, moves),
  );
}

/** How many tokens the steps of an answer took from drafts: a bar for each length. */
function acceptedRuns(runs, written) {
  if (!runs.length) return [];
  const most = Math.max(...runs.map(({ steps: times }) => times));
  const drafted = runs.reduce((sum, { tokens, steps: times }) => sum + tokens * times, 0);
  const rows = runs.map(({ tokens, steps: times }) =>
    element(
      "tr",
      {},
      element("td", { textContent: `${tokens} accepted` }),
      element("td", {}, element("progress", { max: most, value: times })),
      element("td", { textContent: `${times} steps` }),
    ),
  );
  const share = written ? ` of ${written} output tokens` : "";
  return [
    element("p", { className: "figures" }, `${drafted}${share} were drafts`),
    element("div", { className: "wide" }, element("table", {}, ...rows)),
  ];
}

const mark = (x, kind, title) =>
  svg("path", { d: `M${x} 60l-7 -18h14z`, class: kind }, svgTitle(title));

/** What has the same rounded time is told in its turn: a request leaves one replica, then goes to the next. */
function steps(route, moves) {
  const rows = [
    ...route.map((one, turn) => [
      one.at_ms,
      `to ${one.replica}`,
      `${one.why}; expected ${milliseconds(one.expected_ms)} to the first token, ${one.expected_cached_tokens} tokens cached, ${one.emitted_tokens} written before`,
      turn,
    ]),
    ...moves.map((one, turn) => [one.at_ms, `leaves ${one.from}`, one.why, turn + 0.5]),
  ].sort((one, other) => one[0] - other[0] || one[3] - other[3]);
  const cells = ([when, what, why]) => [milliseconds(when), what, why];
  return element(
    "div",
    { className: "wide" },
    element("table", {}, ...rows.map((row) =>
      element("tr", {}, ...cells(row).map((cell) => element("td", { textContent: cell }))),
    )),
  );
}
