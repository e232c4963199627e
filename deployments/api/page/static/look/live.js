// The live view: /v1/live once a second, while it is looked at.

import { ask, told } from "../api.js";
import { element } from "../dom.js";
import { showEvents, showQueues, showReplicas, showRequests, showRouting, showTotals } from "./live_parts.js";

const PERIOD = 1000; // milliseconds
const HISTORY = 60; // looks that are kept of each replica

export class Live {
  #history = new Map(); // by replica: [{at, tokens, step, used}]
  #timer = 0;
  #on = false;

  constructor(section) {
    const part = (name) => (this[name] = element("div"));
    this.trouble = element("p", { className: "failure", role: "alert", hidden: true });
    const titled = (title, name) => [element("h2", { textContent: title }), part(name)];
    section.append(
      element(
        "div",
        { className: "column live" },
        this.trouble,
        part("totals"),
        ...titled("Replicas", "replicas"),
        ...titled("Running and waiting", "requests"),
        ...titled("Queues by key", "queues"),
        ...titled("Routing", "routing"),
        ...titled("Moves, losses and new replicas", "events"),
      ),
    );
    document.addEventListener("visibilitychange", () => this.#on && this.#next(0));
  }

  show() {
    this.#on = true;
    this.#next(0);
  }

  hide() {
    this.#on = false;
    clearTimeout(this.#timer);
  }

  #next(wait) {
    clearTimeout(this.#timer);
    if (this.#on && !document.hidden) this.#timer = setTimeout(() => this.#look(), wait);
  }

  async #look() {
    try {
      const response = await ask("v1/live");
      this.#draw(await response.json());
      this.trouble.hidden = true;
      this.#next(PERIOD);
    } catch (error) {
      this.trouble.textContent = told(error);
      this.trouble.hidden = false;
      // Without the right key another look would be refused too.
      if (error.status === 401 || error.status === 403 || error.status === 404) clearTimeout(this.#timer);
      else this.#next(5 * PERIOD);
    }
  }

  #draw({ routers, key_names: names }) {
    const view = merged(routers);
    const key = (id) => names[id] ?? (id ? id.slice(0, 8) : "–");
    for (const replica of view.replicas) replica.history = this.#remember(replica);
    showTotals(this.totals, view);
    showReplicas(this.replicas, view);
    showRequests(this.requests, view, key);
    showQueues(this.queues, view, key);
    showRouting(this.routing, view);
    showEvents(this.events, view);
  }

  /** The last looks at a replica, with what it did between two of them. */
  #remember({ id, stats }) {
    const kept = this.#history.get(id) ?? [];
    this.#history.set(id, kept);
    const last = kept.at(-1);
    const at = performance.now();
    if (last && stats.step < last.step) kept.length = 0; // another process has its name
    const seconds = last ? (at - last.at) / 1000 : 0;
    const rate = kept.length && seconds ? (stats.output_tokens - last.output) / seconds : 0;
    const used = stats.total_blocks ? 1 - stats.free_blocks / stats.total_blocks : 0;
    kept.push({ at, step: stats.step, output: stats.output_tokens, rate, used });
    if (kept.length > HISTORY) kept.shift();
    return kept;
  }
}

/** One view of what all routers tell: of a replica the newest news, of the rest everything. */
function merged(routers) {
  const replicas = new Map();
  const queues = new Map();
  const view = { routers, in_flight: 0, queued: 0, queued_tokens: 0 };
  const lists = { requests: [], choices: [], events: [] };
  const several = routers.some(({ models }) => models.length > 1);
  for (const { router, models } of routers)
    for (const model of models) {
      for (const name of ["in_flight", "queued", "queued_tokens"]) view[name] += model[name];
      for (const [name, list] of Object.entries(lists))
        list.push(...model[name].map((one) => ({ ...one, router, base: model.model })));
      for (const queue of model.queues) {
        const sum = queues.get(queue.key) ?? { key: queue.key, requests: 0, tokens: 0 };
        sum.requests += queue.requests;
        sum.tokens += queue.tokens;
        queues.set(queue.key, sum);
      }
      for (const replica of model.replicas) {
        const id = several ? `${model.model} ${replica.name}` : replica.name;
        const known = replicas.get(id);
        if (!known || replica.stats.step > known.stats.step)
          replicas.set(id, { ...replica, id, base: model.model });
      }
    }
  lists.choices.sort((one, other) => one.ago_s - other.ago_s);
  lists.events.sort((one, other) => one.ago_s - other.ago_s);
  return {
    ...view,
    ...lists,
    events: once(lists.events),
    choices: lists.choices.slice(0, 50),
    replicas: [...replicas.values()].sort((one, other) => one.id.localeCompare(other.id)),
    queues: [...queues.values()].sort((one, other) => other.tokens - one.tokens),
  };
}

/** Each router tells of a lost replica; one is enough. */
function once(events) {
  const seen = new Set();
  return events.filter(({ kind, replica, request, ago_s: ago }) => {
    const name = request ? `${request} ${ago}` : `${kind} ${replica} ${Math.round(ago / 5)}`;
    return !seen.has(name) && seen.add(name);
  });
}
