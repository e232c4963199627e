// One question to 2 to 4 models beside each other: a base and its adapters, or several models.

import { told } from "../api.js";
import { button, eachFrame, element } from "../dom.js";
import { Answer, generate } from "../generation.js";
import { AnswerBox } from "./message.js";
import { modelChoice, models } from "../models.js";
import { Parameters } from "./parameters.js";

const FEWEST = 2;
const MOST = 4;

export class Compare {
  constructor(section) {
    this.columns = [];
    this.stopping = null;
    this.parameters = new Parameters("compare", true);
    this.parameters.node.open = false;
    this.input = element("textarea", {
      rows: 3,
      placeholder: "A question for all of them. Enter sends it.",
      aria: { label: "Question" },
      on: {
        keydown: (event) => {
          if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
          event.preventDefault();
          this.#ask();
        },
      },
    });
    this.go = button("Ask", () => (this.stopping ? this.stop() : this.#ask()));
    this.more = button("One more", () => this.#add());
    this.less = button("One less", () => this.#remove());
    this.grid = element("div", { className: "compare" });
    section.append(
      element(
        "div",
        { className: "column" },
        this.parameters.node,
        element("div", { className: "composer" }, this.input, this.go),
        element("div", { className: "row" }, this.more, this.less),
        this.grid,
      ),
    );
    for (let made = 0; made < FEWEST; made++) this.#add();
  }

  focus() {
    this.input.focus();
  }

  stop() {
    this.stopping?.abort();
  }

  #add() {
    const at = this.columns.length;
    const model = modelChoice(`Model ${at + 1}`, () => models()[at % models().length]?.id);
    const figures = element("p", { className: "figures" });
    const body = element("div");
    const node = element("section", {}, model, figures, body);
    this.columns.push({ model, figures, body, node });
    this.grid.append(node);
    this.#bounds();
  }

  #remove() {
    const { model, node } = this.columns.pop();
    model.forget();
    node.remove();
    this.#bounds();
  }

  #bounds() {
    this.more.disabled = this.columns.length >= MOST;
    this.less.disabled = this.columns.length <= FEWEST;
  }

  async #ask() {
    const content = this.input.value.trim();
    if (!content || this.stopping) return;
    const messages = [{ role: "user", content }];
    if (this.parameters.system) messages.unshift({ role: "system", content: this.parameters.system });
    let fields;
    try {
      ({ fields } = this.parameters);
    } catch (error) {
      this.columns[0].figures.textContent = error.message;
      return;
    }
    this.stopping = new AbortController();
    this.go.textContent = "Stop";
    const asked = this.columns.map((column) => this.#column(column, { messages, ...fields }));
    await Promise.all(asked);
    this.stopping = null;
    this.go.textContent = "Ask";
  }

  async #column({ model, figures, body }, fields) {
    const answer = new Answer();
    const box = new AnswerBox();
    const draw = eachFrame(() => box.show(answer, !answer.finish));
    body.replaceChildren(box.node);
    figures.className = "figures";
    figures.textContent = "…";
    const sent = { model: model.value, ...fields };
    try {
      await generate("v1/chat/completions", sent, answer, this.stopping.signal, draw);
      figures.textContent = answer.figures;
    } catch (error) {
      figures.textContent = told(error) || answer.figures || "stopped";
      figures.classList.toggle("failure", told(error) !== "");
    }
  }
}
