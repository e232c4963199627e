// Requests to the server that this page came from, with the key that this tab was given.

const BASE = new URL("..", import.meta.url); // the application may be behind a prefix
const KEY = "manta-key";

export const address = (path) => new URL(path, BASE).href;

/** The key lives as long as the tab. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class ApiError extends Error {
  constructor(status, { message = "", code = "", param = null } = {}) {
    super(message || `the server answered ${status}`);
    Object.assign(this, { status, code, param });
  }

  get shown() {
    const where = this.param ? ` (${this.param})` : "";
    return `${this.message}${where}`;
  }
}

/** What a failure is called on the page; "" if it was the reader's own stop. */
export function told(error) {
  if (error.name === "AbortError") return "";
  if (error instanceof ApiError) return error.shown;
  return `The server cannot be reached: ${error.message}`;
}

/** @returns {Promise<Response>} Throws ApiError; a 401 also asks for the key. */
export async function ask(path, body = undefined, { signal, headers = {} } = {}) {
  const sent = { ...headers };
  if (key.get()) sent.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  const response = await fetch(address(path), {
    method: body === undefined ? "GET" : "POST",
    headers: sent,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    credentials: "omit",
    cache: "no-store",
  });
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  if (response.status === 401) document.dispatchEvent(new CustomEvent("key-wanted"));
  throw new ApiError(response.status, answer.error);
}

export const getJson = async (path, options) => (await ask(path, undefined, options)).json();

/** The data of each server-sent event, until [DONE]. Throws ApiError if one is an error. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, { message: "the stream was cut" });
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((one) => one.startsWith("data: "));
      if (line === undefined) continue; // a comment, which keeps the connection open
      if (line === "data: [DONE]") return;
      const data = JSON.parse(line.slice(6));
      if (data.error) throw new ApiError(0, data.error);
      yield data;
    }
  }
}
