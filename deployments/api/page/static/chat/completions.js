// Completions: a text that the model goes on with.

import { address, key, told } from "../api.js";
import { button, copy, eachFrame, element } from "../dom.js";
import { Answer, generate } from "../generation.js";
import { showTokens } from "./message.js";
import { modelChoice } from "../models.js";
import { Parameters } from "./parameters.js";
import { curl, python } from "./snippets.js";

const PATH = "v1/completions";

export class Completions {
  constructor(section) {
    this.stopping = null;
    this.model = modelChoice("Model");
    this.parameters = new Parameters("completions", false);
    this.input = element("textarea", {
      rows: 12,
      placeholder: "A text to go on with. Ctrl and Enter send it.",
      aria: { label: "Text" },
      on: { keydown: (event) => event.key === "Enter" && event.ctrlKey && this.#go() },
    });
    this.go = button("Go on", () => (this.stopping ? this.stop() : this.#go()));
    this.take = button("Take over", () => this.#take(), "Put what came behind the text");
    this.take.disabled = true;
    this.output = element("div", { className: "text plain", aria: { live: "polite" } });
    this.figures = element("p", { className: "figures" });
    section.append(
      element("aside", {}, element("label", {}, "Model", this.model), this.parameters.node),
      element(
        "div",
        { className: "column" },
        this.input,
        element(
          "div",
          { className: "row" },
          this.go,
          this.take,
          this.#copies("Copy as curl", curl),
          this.#copies("Copy as Python", python),
        ),
        this.figures,
        this.output,
      ),
    );
  }

  focus() {
    this.input.focus();
  }

  stop() {
    this.stopping?.abort();
  }

  get #body() {
    return { model: this.model.value, prompt: this.input.value, ...this.parameters.fields };
  }

  async #go() {
    if (this.stopping || !this.input.value) return;
    const answer = (this.answer = new Answer());
    const draw = eachFrame(() => this.#draw(answer));
    this.output.replaceChildren();
    this.figures.textContent = "";
    this.stopping = new AbortController();
    this.go.textContent = "Stop";
    let failure = "";
    try {
      await generate(PATH, this.#body, answer, this.stopping.signal, draw);
    } catch (error) {
      failure = told(error);
    }
    this.stopping = null;
    this.go.textContent = "Go on";
    this.#draw(answer);
    this.take.disabled = !answer.content;
    this.figures.replaceChildren(failure || answer.figures);
    this.figures.classList.toggle("failure", failure !== "");
    if (answer.requestId)
      this.figures.append(
        " ",
        element("a", { href: `#request=${answer.requestId}`, textContent: "Time line" }),
      );
  }

  #draw(answer) {
    if (answer.tokens.length) showTokens(this.output, answer.tokens);
    else this.output.textContent = answer.content;
  }

  #take() {
    this.input.value += this.answer.content;
    this.output.replaceChildren();
    this.take.disabled = true;
    this.input.focus();
  }

  #copies(label, write) {
    const made = button(label, () => {
      try {
        copy(write(address(PATH), this.#body, key.get() !== ""), made);
      } catch (error) {
        this.figures.textContent = error.message;
      }
    });
    return made;
  }
}
