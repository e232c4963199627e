// The parts of the live view, each drawn anew from one look.

import { element, svg, svgTitle } from "../dom.js";

const UNTOLD = "not told yet"; // by a replica that this router has not reached
const COLUMNS = 64; // of a replica's grid of KV blocks
const ROWS = 4;
const CELL = 6; // pixels
const SHOWN = 40; // requests in the table

const number = (value) => Math.round(value).toLocaleString("en");
const milliseconds = (value) => (value === null ? "–" : `${value.toFixed(value < 10 ? 1 : 0)} ms`);
const ago = (seconds) => (seconds < 60 ? `${seconds.toFixed(1)} s` : `${(seconds / 60).toFixed(0)} min`);
const sum = (list, what) => list.reduce((total, one) => total + what(one), 0);

/** The same colour for a request wherever it is drawn. */
function hue(id) {
  let mixed = 7;
  for (const character of id) mixed = (mixed * 31 + character.charCodeAt(0)) % 65_521;
  return `hsl(${Math.round(mixed * 137.508) % 360} 62% 55%)`; // ids that differ little, far apart
}

const link = (id) =>
  element("a", { href: `#request=${encodeURIComponent(id)}`, textContent: id.slice(0, 20), title: id });

function table(head, rows, empty) {
  if (!rows.length) return element("p", { className: "figures", textContent: empty });
  const row = (cells, tag) =>
    element("tr", {}, ...cells.map((cell) => element(tag, {}, cell instanceof Node ? cell : String(cell))));
  return element(
    "div",
    { className: "wide" },
    element("table", {}, element("thead", {}, row(head, "th")), element("tbody", {}, ...rows.map((one) => row(one, "td")))),
  );
}

export function showTotals(box, { routers, replicas, in_flight: flying, queued, queued_tokens: tokens }) {
  const figures = [
    ["routers", routers.length],
    ["replicas", `${replicas.filter((one) => one.available).length} of ${replicas.length}`],
    ["requests in flight", number(flying)],
    ["running", number(sum(replicas, ({ stats }) => stats.running))],
    ["waiting at replicas", number(sum(replicas, ({ stats }) => stats.waiting))],
    ["waiting at routers", `${number(queued)} (${number(tokens)} tokens)`],
    ["tokens a second", number(sum(replicas, ({ history }) => history.at(-1).rate))],
  ];
  box.replaceChildren(
    element(
      "dl",
      { className: "totals" },
      ...figures.map(([name, value]) =>
        element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value })),
      ),
    ),
  );
}

// -- replicas

export function showReplicas(box, { replicas, requests }) {
  const cards = replicas.map((replica) => {
    const here = requests.filter(
      (one) => one.base === replica.base && one.replicas.includes(replica.name),
    );
    return card(replica, here);
  });
  box.replaceChildren(element("div", { className: "cards" }, ...cards));
  if (!cards.length) box.textContent = "No router knows a replica yet.";
}

function card({ id, stats, available, connected, cost, room, history, ours }, here) {
  const state = available ? "" : !connected ? "not connected" : stats.draining ? "is to stop" : "unavailable";
  const used = stats.total_blocks - stats.free_blocks;
  const rows = [
    ["batch", stats.rows ? `${stats.running} of ${stats.rows} rows, ${stats.waiting} wait` : UNTOLD],
    ["step", milliseconds(1000 * stats.step_seconds)],
    ["tokens a second", number(history.at(-1).rate)],
    ["KV blocks", stats.total_blocks ? `${number(used)} of ${number(stats.total_blocks)}, ${number(stats.reserved_blocks)} at full length` : UNTOLD],
    ["expected wait", `${milliseconds(cost.wait_ms)}, and ${cost.prompt_token_ms ?? "–"} ms a prompt token`],
    ["takes now", `${room} more; it has ${ours} of this router`],
    ["preemptions", number(stats.preemptions)],
  ];
  if (stats.adapters.length) rows.push(["adapters", stats.adapters.join(", ")]);
  const cells = rows.flatMap(([name, value]) => [
    element("dt", { textContent: name }),
    element("dd", { textContent: value }),
  ]);
  return element(
    "article",
    { className: "tool" },
    element("h3", {}, id, element("span", { className: "failure" }, state)),
    grid(stats, here),
    sparkline(history.map(({ rate }) => rate), "tokens a second, the last minute"),
    element("dl", { className: "facts" }, ...cells),
  );
}

/** KV blocks: of each request in its colour, as many as its tokens fill; of others that are in use,
 * such as those of another router's requests, grey. */
function grid({ total_blocks: total, free_blocks: free, block_size: size }, here) {
  const canvas = element("canvas", { width: COLUMNS * CELL, height: ROWS * CELL, className: "blocks" });
  canvas.title = "KV blocks in use, in the colours of their requests";
  const draw = canvas.getContext("2d");
  const cells = Math.min(COLUMNS * ROWS, total);
  const scale = cells / Math.max(1, total);
  const runs = here.map((one) => [
    Math.ceil((one.prompt_tokens + one.output_tokens) / Math.max(1, size)),
    hue(one.id),
  ]);
  const known = sum(runs, ([count]) => count);
  const used = total - free;
  // Shared blocks are counted by each request that has them.
  const shrink = known > used ? used / Math.max(1, known) : 1;
  runs.push([Math.max(0, used - known) / shrink, "#8888"]);
  let at = 0;
  for (const [count, colour] of runs) {
    const until = at + count * shrink * scale;
    draw.fillStyle = colour;
    for (let cell = Math.round(at); cell < Math.round(until); cell++) fill(draw, cell);
    at = until;
  }
  draw.fillStyle = "#8882";
  for (let cell = Math.round(at); cell < cells; cell++) fill(draw, cell);
  return canvas;
}

const fill = (draw, cell) =>
  draw.fillRect((cell % COLUMNS) * CELL, Math.floor(cell / COLUMNS) * CELL, CELL - 1, CELL - 1);

function sparkline(values, title) {
  const most = Math.max(1, ...values);
  const points = values.map((value, at) => `${(4 * at).toFixed(0)},${(30 - (28 * value) / most).toFixed(1)}`);
  return svg(
    "svg",
    { viewBox: "0 0 240 32", class: "spark", preserveAspectRatio: "none" },
    svgTitle(`${title}: ${number(values.at(-1) ?? 0)}, at most ${number(most)}`),
    svg("polyline", { points: points.join(" ") }),
  );
}

// -- requests, queues, choices and moves

export function showRequests(box, { requests }, key) {
  const rows = requests
    .toSorted((one, other) => other.age_s - one.age_s)
    .slice(0, SHOWN)
    .map((one) => {
      const dot = element("i", { className: "dot" });
      dot.style.background = hue(one.id);
      return [
        element("span", {}, dot, link(one.id)),
        one.model,
        key(one.key),
        one.replicas.join(", ") || one.state,
        `${number(one.prompt_tokens)} (${number(one.cached_tokens)} cached)`,
        `${number(one.output_tokens)} of ${one.max_tokens === null ? "any" : number(one.max_tokens)}`,
        ago(one.age_s),
        milliseconds(one.first_token_ms),
      ];
    });
  const head = ["request", "model", "key", "where", "prompt", "output", "for", "first token"];
  box.replaceChildren(table(head, rows, "Nothing is in flight."));
  if (requests.length > SHOWN) box.append(`… and ${number(requests.length - SHOWN)} more that are shown in the grids`);
}

export function showQueues(box, { queues }, key) {
  const most = Math.max(1, ...queues.map(({ tokens }) => tokens));
  const rows = queues.map((one) => {
    const bar = element("meter", { max: most, value: one.tokens });
    return [key(one.key), number(one.requests), number(one.tokens), bar];
  });
  box.replaceChildren(table(["key", "requests", "tokens", ""], rows, "Nothing waits at a router."));
}

export function showRouting(box, { choices }) {
  const rows = choices.slice(0, 20).map((one) => [
    ago(one.ago_s),
    link(one.request),
    one.replica,
    one.reason,
    `${number(one.prompt_tokens)}, ${number(one.expected_cached_tokens)} cached`,
    milliseconds(one.expected_ms),
    milliseconds(one.first_token_ms),
  ]);
  const head = ["ago", "request", "to", "why", "prompt", "expected wait", "first token came after"];
  box.replaceChildren(table(head, rows, "No request was sent to a replica lately."));
}

export function showEvents(box, { events }) {
  const what = { moved: "left by a request", lost: "lost", joined: "new" };
  const rows = events.slice(0, 20).map(({ ago_s: seconds, kind, replica, request, why }) => [
    ago(seconds),
    replica,
    what[kind] ?? kind,
    request ? link(request) : "",
    why,
  ]);
  box.replaceChildren(table(["ago", "replica", "", "request", "why"], rows, "Nothing has happened."));
}
