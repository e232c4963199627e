// How what a model has written is shown: its thinking folded, its calls, and its tokens' colours.

import { element } from "../dom.js";
import { showMarkdown } from "./markdown.js";

/** A box for an answer; `show(answer, live)` draws what has come of it. */
export class AnswerBox {
  constructor() {
    this.thinking = element("div", { className: "text" });
    this.fold = element(
      "details",
      { className: "thinking", hidden: true },
      element("summary", { textContent: "Thinking" }),
      this.thinking,
    );
    this.text = element("div", { className: "text" });
    this.calls = element("div", { className: "calls" });
    this.node = element("div", { className: "answer" }, this.fold, this.text, this.calls);
  }

  show({ content, reasoning, calls, tokens }, live = false) {
    this.fold.hidden = !reasoning;
    if (reasoning) {
      const words = reasoning.split(/\s+/).length;
      this.fold.firstChild.textContent = live && !content ? "Thinking …" : `Thinking (${words} words)`;
      showMarkdown(this.thinking, reasoning);
    }
    if (tokens?.length) showTokens(this.text, tokens);
    else showMarkdown(this.text, content ?? "");
    this.calls.replaceChildren(...(calls ?? []).filter(Boolean).map(showCall));
    this.node.ariaBusy = String(live);
  }
}

function showCall({ function: { name, arguments: given } }) {
  let shown = given;
  try {
    shown = JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    // It is still coming, or is no JSON; it is shown as it is.
  }
  return element(
    "figure",
    { className: "code" },
    element("figcaption", {}, `calls ${name}`),
    element("pre", {}, element("code", { textContent: shown })),
  );
}

/** Each token in the colour of its probability, with what else there might have been. What is
 * there stays, so a stream adds its end only. */
export function showTokens(box, tokens) {
  if (!box.firstChild?.classList?.contains("tokens"))
    box.replaceChildren(element("div", { className: "tokens" }));
  const list = box.firstChild;
  while (list.children.length > tokens.length) list.lastChild.remove();
  for (const { token, logprob, top } of tokens.slice(list.children.length)) {
    const level = logprob === null ? 4 : Math.min(4, Math.floor(5 * Math.exp(logprob)));
    const others = (top ?? []).map((one) => `${percent(one.logprob)} ${JSON.stringify(one.token)}`);
    const title = [logprob === null ? "first token" : percent(logprob), ...others].join("\n");
    list.append(element("span", { className: `p${level}`, textContent: token, title }));
  }
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
