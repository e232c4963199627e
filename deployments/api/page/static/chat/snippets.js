// A request as a program. No DOM here, and no key: programs read it from the environment.

// What the openai package names as arguments; the rest goes into extra_body.
const NAMED = new Set([
  "model", "messages", "prompt", "temperature", "top_p", "max_tokens", "n", "seed", "stop",
  "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "stream",
  "stream_options", "tools", "tool_choice", "parallel_tool_calls", "response_format",
  "reasoning_effort", "user", "echo", "max_completion_tokens",
]);

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

export function curl(address, body, keyed) {
  const header = keyed ? ' \\\n  -H "Authorization: Bearer $MANTA_API_KEY"' : "";
  return (
    `curl -N ${quoted(address)} \\\n  -H 'Content-Type: application/json'${header} \\\n` +
    `  -d ${quoted(JSON.stringify({ ...body, stream: true }, null, 2))}\n`
  );
}

export function python(address, body, keyed) {
  const chat = address.endsWith("/chat/completions");
  const base = address.replace(/\/(chat\/)?completions$/, "");
  const entries = Object.entries({ ...body, stream: true });
  const named = entries.filter(([name]) => NAMED.has(name));
  const extra = Object.fromEntries(entries.filter(([name]) => !NAMED.has(name)));
  const lines = named.map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra, 4)},`);
  const text = chat ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
  return `${keyed ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(base)}, api_key=${
    keyed ? 'os.environ["MANTA_API_KEY"]' : '"none"'
  })
stream = client.${chat ? "chat.completions" : "completions"}.create(
${lines.join("\n")}
)
for chunk in stream:
    if chunk.choices:
        print(${text} or "", end="", flush=True)
`;
}

/** A JSON value in Python. */
function literal(value, indent) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = " ".repeat(indent + 4);
  const array = Array.isArray(value);
  const items = array
    ? value.map((item) => `${inner}${literal(item, indent + 4)},`)
    : Object.entries(value).map(
        ([name, item]) => `${inner}${JSON.stringify(name)}: ${literal(item, indent + 4)},`,
      );
  const [open, close] = array ? "[]" : "{}";
  return items.length ? `${open}\n${items.join("\n")}\n${" ".repeat(indent)}${close}` : open + close;
}
