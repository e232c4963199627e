// The chat: one conversation with branches.

import { address, key, told } from "../api.js";
import { Conversation } from "./conversation.js";
import { atEnd, button, copy, eachFrame, element } from "../dom.js";
import { Answer, generate } from "../generation.js";
import { AnswerBox } from "./message.js";
import { modelChoice, models } from "../models.js";
import { Parameters } from "./parameters.js";
import { Pictures, picture } from "./pictures.js";
import { curl, python } from "./snippets.js";

const KEPT = "manta-conversation";
const PATH = "v1/chat/completions";

export class Chat {
  constructor(section) {
    this.conversation = new Conversation();
    this.stopping = null; // the AbortController of the answer that comes
    this.failure = "";
    this.parameters = new Parameters("chat", true);
    this.model = modelChoice("Model");
    this.log = element("div", { className: "log", role: "log", tabIndex: 0 });
    this.input = element("textarea", {
      rows: 3,
      placeholder: "Write a message. Enter sends it, Shift and Enter begin a line.",
      aria: { label: "Message" },
      on: {
        keydown: (event) => this.#typed(event),
        paste: (event) => this.pictures.take(event.clipboardData) && event.preventDefault(),
      },
    });
    this.pictures = new Pictures(
      () => this.input.focus(),
      (message) => this.#fail(message),
    );
    this.attach = button("Picture", () => this.pictures.choose(), "A picture for the message");
    this.model.addEventListener("change", () => this.#offer());
    this.model.addEventListener("filled", () => this.#offer());
    this.send = button("Send", () => this.#sendOrStop());
    this.copied = element(
      "div",
      { className: "row" },
      this.#copies("Copy as curl", curl),
      this.#copies("Copy as Python", python),
      this.attach,
      button("New", () => this.#begin(new Conversation())),
      button("Export", () => this.#export()),
      button("Import", () => this.#import()),
    );
    section.append(
      element("aside", {}, element("label", {}, "Model", this.model), this.parameters.node),
      element(
        "div",
        {
          className: "column",
          on: {
            dragover: (event) => event.preventDefault(),
            drop: (event) => {
              event.preventDefault();
              this.pictures.take(event.dataTransfer);
            },
          },
        },
        this.log,
        this.pictures.node,
        element("div", { className: "composer" }, this.input, this.send),
        this.copied,
      ),
    );
    this.#offer();
    this.#restore();
  }

  /** Pictures and clips are offered where the model takes them. */
  #offer() {
    const chosen = models().find(({ id }) => id === this.model.value);
    this.attach.hidden = !chosen?.input_modalities?.includes("image");
    this.pictures.offerClips(chosen?.input_modalities?.includes("video") ?? false);
  }

  focus() {
    this.input.focus();
  }

  /** Escape. */
  stop() {
    this.stopping?.abort();
  }

  // -- what is said

  #typed(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.stopping) this.#sendOrStop();
    } else if (event.key === "ArrowUp" && !this.input.value) {
      const mine = this.conversation.path.findLast(({ role }) => role === "user");
      if (!mine || this.stopping) return;
      event.preventDefault();
      this.#edit(mine);
    }
  }

  #sendOrStop() {
    if (this.stopping) {
      this.stop();
      return;
    }
    const content = this.input.value.trim();
    if (!content && !this.pictures.urls.length) return;
    this.input.value = "";
    const said = { role: "user", content, ...this.pictures.give() };
    this.#answer(this.conversation.add(this.conversation.last, said).id);
  }

  #body(upTo) {
    return {
      model: this.model.value,
      messages: this.conversation.messages(upTo, this.parameters.system),
      ...this.parameters.fields,
    };
  }

  /** Let the model answer to a message. */
  async #answer(to) {
    let body;
    this.failure = "";
    try {
      body = this.#body(to);
    } catch (error) {
      this.#fail(error.message);
      return;
    }
    const answer = new Answer();
    const node = this.conversation.add(to, { role: "assistant", content: "", model: body.model });
    const stopping = (this.stopping = new AbortController());
    this.#draw();
    const show = () => this.boxes.get(node.id)?.show(answer, this.stopping === stopping);
    const draw = eachFrame(() => atEnd(this.log, show));
    try {
      await generate(PATH, body, answer, stopping.signal, draw);
    } catch (error) {
      this.failure = told(error);
    }
    if (this.stopping === stopping) this.stopping = null;
    const { content, reasoning, calls, tokens, requestId, figures } = answer;
    Object.assign(node, { content, reasoning, calls, tokens, requestId, figures });
    this.#draw();
    this.#keep();
  }

  #fail(message) {
    this.failure = message;
    this.#draw();
  }

  // -- what is shown

  #draw() {
    this.boxes = new Map();
    this.send.textContent = this.stopping ? "Stop" : "Send";
    const shown = this.conversation.path.map((node) => this.#message(node));
    if (this.failure) shown.push(element("p", { className: "failure", role: "alert" }, this.failure));
    atEnd(this.log, () => this.log.replaceChildren(...shown));
    if (this.stopping) this.log.scrollTop = this.log.scrollHeight;
  }

  #message(node) {
    const what = { user: "You", tool: "Result", assistant: node.model ?? "Model" }[node.role];
    const figures = element("span", { className: "figures" }, node.figures ?? "");
    const article = element("article", { className: node.role }, element("h2", {}, what, figures));
    const actions = element("div", { className: "row actions" });
    if (node.role === "assistant") {
      const box = new AnswerBox();
      box.show(node, false);
      this.boxes.set(node.id, box);
      article.append(box.node);
      actions.append(
        this.#copying(node),
        button("Again", () => this.#answer(node.parent), "Another answer, as a branch"),
      );
      if (node.requestId)
        actions.append(
          element("a", { href: `#request=${node.requestId}`, textContent: "Time line" }),
        );
      if (node.id === this.conversation.last && !this.stopping)
        article.append(...(node.calls ?? []).filter(Boolean).map((call) => this.#result(node, call)));
    } else {
      if (node.pictures?.length)
        article.append(
          element("div", { className: "row pictures" }, ...node.pictures.map(picture), node.clip ? "one clip" : null),
        );
      article.append(element("div", { className: "said", textContent: node.content }));
      actions.append(button("Edit", () => this.#edit(node), "Another message, as a branch"));
    }
    const [number, count] = this.conversation.place(node.id);
    if (count > 1)
      actions.append(
        element(
          "span",
          { className: "branches" },
          this.#turning(node, -1, "‹", "The branch before"),
          `${number}/${count}`,
          this.#turning(node, 1, "›", "The next branch"),
        ),
      );
    for (const one of actions.querySelectorAll("button")) one.disabled = this.stopping !== null;
    article.append(actions);
    return article;
  }

  #copying(node) {
    const made = button("Copy", () => copy(node.content, made));
    return made;
  }

  #turning(node, step, label, title) {
    const turn = () => {
      this.conversation.turn(node.id, step);
      this.#draw();
      this.#keep();
    };
    return button(label, turn, title);
  }

  /** In place of a message, the means to write another one beside it. */
  #edit(node) {
    const article = this.log.children[this.conversation.path.indexOf(node)];
    const input = element("textarea", { rows: 4, value: node.content, aria: { label: "Edit" } });
    const done = () => {
      const { role, callId, pictures, clip } = node;
      const beside = { role, callId, pictures, clip, content: input.value.trim() };
      if (beside.content || pictures?.length) this.#answer(this.conversation.add(node.parent, beside).id);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        done();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        this.#draw();
        this.input.focus();
      }
    });
    const cancel = button("Cancel", () => this.#draw());
    const row = element("div", { className: "row" }, button("Send", done), cancel);
    article.replaceChildren(input, row);
    input.focus();
    input.setSelectionRange(input.value.length, input.value.length);
  }

  /** A box for what a called function has returned. */
  #result(node, { id, function: { name } }) {
    const input = element("textarea", { rows: 2, placeholder: `What ${name} returns` });
    const others = () => [...article().querySelectorAll(".result textarea")];
    const article = () => input.closest("article");
    const give = () => {
      if (others().some(({ value }) => !value.trim())) return; // all calls need theirs
      let last = node.id;
      others().forEach((one, at) => {
        const call = node.calls.filter(Boolean)[at];
        const result = { role: "tool", content: one.value.trim(), callId: call.id };
        last = this.conversation.add(last, result).id;
      });
      this.#answer(last);
    };
    const label = `Result of ${name}`;
    return element("label", { className: "result", data: { call: id } }, label, input, button("Give", give));
  }

  // -- what is kept: in this tab, and in files that its reader asks for

  #keep() {
    try {
      sessionStorage.setItem(KEPT, JSON.stringify(this.conversation));
    } catch {
      sessionStorage.removeItem(KEPT); // it is larger than a tab may keep
    }
  }

  #restore() {
    try {
      this.conversation = Conversation.from(JSON.parse(sessionStorage.getItem(KEPT)));
    } catch {
      this.conversation = new Conversation();
    }
    this.#draw();
  }

  #begin(conversation) {
    this.stop();
    this.failure = "";
    this.conversation = conversation;
    this.#draw();
    this.#keep();
    this.input.focus();
  }

  #export() {
    const text = new Blob([JSON.stringify(this.conversation, null, 1)], { type: "application/json" });
    const href = URL.createObjectURL(text);
    element("a", { href, download: "conversation.json" }).click();
    setTimeout(() => URL.revokeObjectURL(href), 10_000);
  }

  #import() {
    const take = async ({ target }) => {
      try {
        this.#begin(Conversation.from(JSON.parse(await target.files[0].text())));
      } catch (error) {
        this.#fail(`The file is no conversation: ${error.message}`);
      }
    };
    element("input", { type: "file", accept: ".json", on: { change: take } }).click();
  }

  #copies(label, write) {
    const made = button(label, () => {
      try {
        copy(write(address(PATH), this.#body(this.#upTo), key.get() !== ""), made);
      } catch (error) {
        this.#fail(error.message);
      }
    });
    return made;
  }

  /** What a copied request ends with: the last message that is not the model's. */
  get #upTo() {
    return this.conversation.path.findLast(({ role }) => role !== "assistant")?.id ?? 0;
  }
}
