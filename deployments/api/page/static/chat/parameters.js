// The form of a request's parameters. What is left empty is not sent: the server decides it.

import { element } from "../dom.js";

const KEPT = "manta-parameters";

// name, label, what it takes, bounds
const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }],
  ["top_k", "Top k", { min: -1, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["max_tokens", "Tokens at most", { min: 1, step: 1 }],
  ["seed", "Seed", { min: 0, step: 1 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.01, max: 10, step: 0.05 }],
];

const TEXTS = {
  system: ["System message", "What the model is told first"],
  stop: ["Stop at", "One text a line, 4 at most"],
  tools: ["Tools", '[{"type": "function", "function": {"name": …, "parameters": {…}}}]'],
  schema: ["Schema of the answer", '{"type": "object", "properties": {…}}'],
  more: ["More fields", '{"chat_template_kwargs": {"enable_thinking": false}}'],
};

/** One per view. `chat`: with what only chats have. */
export class Parameters {
  #fields = new Map();

  constructor(view, chat) {
    this.view = view;
    this.chat = chat;
    const texts = Object.keys(TEXTS).filter((name) => chat || name === "stop" || name === "more");
    this.node = element(
      "details",
      { className: "parameters", open: chat && innerWidth > 900 },
      element("summary", { textContent: "Parameters" }),
      ...texts.filter((name) => name === "system").map((name) => this.#text(name)),
      element("div", { className: "numbers" }, ...NUMBERS.map((row) => this.#number(...row))),
      this.#check("logprobs", "Colour tokens by probability"),
      ...texts.filter((name) => name !== "system").map((name) => this.#text(name)),
    );
    const kept = JSON.parse(sessionStorage.getItem(`${KEPT}-${view}`) ?? "{}");
    for (const [name, input] of this.#fields) {
      if (input.type === "checkbox") input.checked = kept[name] ?? false;
      else input.value = kept[name] ?? "";
    }
    this.node.addEventListener("input", () => this.#keep());
  }

  #keep() {
    const values = [...this.#fields].map(([name, input]) => [
      name,
      input.type === "checkbox" ? input.checked : input.value,
    ]);
    sessionStorage.setItem(`${KEPT}-${this.view}`, JSON.stringify(Object.fromEntries(values)));
  }

  #number(name, label, bounds) {
    const input = element("input", { type: "number", placeholder: "default", ...bounds });
    this.#fields.set(name, input);
    return element("label", { title: name }, label, input);
  }

  #check(name, label) {
    const input = element("input", { type: "checkbox" });
    this.#fields.set(name, input);
    return element("label", { className: "check" }, input, label);
  }

  #text(name) {
    const [label, placeholder] = TEXTS[name];
    const input = element("textarea", { rows: 2, placeholder, spellcheck: name === "system" });
    this.#fields.set(name, input);
    return element("label", {}, label, input);
  }

  get system() {
    return this.chat ? this.#fields.get("system").value.trim() : "";
  }

  /** The fields of a request. Throws Error, which names the input, if one is not what it must be. */
  get fields() {
    const found = {};
    for (const [name, label] of NUMBERS) {
      const input = this.#fields.get(name);
      if (!input.checkValidity()) throw new Error(`${label}: ${input.validationMessage}`);
      if (input.value !== "") found[name] = Number(input.value);
    }
    const stop = this.#value("stop").split("\n").filter(Boolean);
    if (stop.length) found.stop = stop;
    if (this.#fields.get("logprobs").checked)
      Object.assign(found, this.chat ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 });
    if (this.chat) {
      const tools = this.#json("tools");
      if (tools !== undefined) found.tools = Array.isArray(tools) ? tools : [tools];
      const schema = this.#json("schema");
      if (schema !== undefined)
        found.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    }
    return { ...found, ...this.#json("more") };
  }

  #value(name) {
    return this.#fields.get(name).value;
  }

  #json(name) {
    const text = this.#value(name).trim();
    if (!text) return undefined;
    try {
      const value = JSON.parse(text);
      if (value !== null && typeof value === "object") return value;
    } catch (error) {
      throw new Error(`${TEXTS[name][0]}: no JSON: ${error.message}`);
    }
    throw new Error(`${TEXTS[name][0]}: an object is wanted`);
  }
}
