// One answer as it comes: of a chat or of a completion.

import { ask, events } from "./api.js";

/** What has come so far. `calls` and `tokens` are as the API has them. */
export class Answer {
  content = "";
  reasoning = "";
  calls = [];
  tokens = []; // {token, logprob, top: [{token, logprob}]}
  finish = "";
  usage = null;
  requestId = "";
  began = performance.now();
  first = 0; // milliseconds until the first token
  ended = 0;

  get empty() {
    return !(this.content || this.reasoning || this.calls.length);
  }

  /** Tokens a second after the first one; 0 if that cannot be said. */
  get speed() {
    const tokens = (this.usage?.completion_tokens ?? 0) - 1;
    return tokens > 0 && this.ended > this.first ? (1000 * tokens) / (this.ended - this.first) : 0;
  }

  get figures() {
    const found = [];
    if (this.first) found.push(`first token ${this.first.toFixed(0)} ms`);
    if (this.usage) found.push(`${this.usage.prompt_tokens} + ${this.usage.completion_tokens} tokens`);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (cached) found.push(`${cached} cached`);
    if (this.speed) found.push(`${this.speed.toFixed(1)} tokens/s`);
    if (this.finish && this.finish !== "stop") found.push(this.finish);
    return found.join(" · ");
  }

  takeChat({ delta = {}, logprobs, finish_reason: finish }) {
    this.content += delta.content ?? "";
    this.reasoning += delta.reasoning_content ?? "";
    for (const call of delta.tool_calls ?? []) {
      const known = (this.calls[call.index] ??= {
        id: "",
        type: "function",
        function: { name: "", arguments: "" },
      });
      known.id ||= call.id ?? "";
      known.function.name += call.function?.name ?? "";
      known.function.arguments += call.function?.arguments ?? "";
    }
    for (const item of logprobs?.content ?? [])
      this.tokens.push({ token: item.token, logprob: item.logprob, top: item.top_logprobs });
    this.finish = finish ?? this.finish;
  }

  takeCompletion({ text = "", logprobs, finish_reason: finish }) {
    this.content += text;
    logprobs?.tokens.forEach((token, at) =>
      this.tokens.push({
        token,
        logprob: logprobs.token_logprobs[at],
        top: Object.entries(logprobs.top_logprobs?.[at] ?? {}).map(([name, logprob]) => ({
          token: name,
          logprob,
        })),
      }),
    );
    this.finish = finish ?? this.finish;
  }
}

/**
 * Ask and stream. `changed(answer)` is called after each event.
 *
 * Throws what ask() throws, and AbortError; the answer keeps what had come.
 */
export async function generate(path, body, answer, signal, changed) {
  const chat = path.endsWith("chat/completions");
  const sent = { ...body, stream: true, stream_options: { include_usage: true } };
  try {
    const response = await ask(path, sent, { signal });
    answer.requestId = response.headers.get("x-request-id") ?? "";
    for await (const event of events(response)) {
      if (event.usage) answer.usage = event.usage;
      const choice = event.choices[0];
      if (choice && chat) answer.takeChat(choice);
      else if (choice) answer.takeCompletion(choice);
      if (!answer.first && !answer.empty) answer.first = performance.now() - answer.began;
      if (!event.usage) answer.ended = performance.now() - answer.began;
      changed(answer);
    }
  } finally {
    answer.ended ||= performance.now() - answer.began;
    changed(answer);
  }
}
