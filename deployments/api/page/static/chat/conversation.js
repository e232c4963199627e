// A conversation is a tree: editing or regenerating a message adds a branch beside it, and nothing
// is lost. No DOM here.

export class Conversation {
  #nodes = new Map([[0, { id: 0, parent: null, children: [], active: null }]]);
  #next = 1;

  /** Add a message behind another one (0: at the beginning) and go to it. */
  add(parent, message) {
    const node = { ...message, id: this.#next++, parent, children: [], active: null };
    this.#nodes.set(node.id, node);
    const above = this.#nodes.get(parent);
    above.children.push(node.id);
    above.active = node.id;
    return node;
  }

  get(id) {
    return this.#nodes.get(id);
  }

  /** The messages of the branch that is shown, the first one first. */
  get path() {
    const found = [];
    let node = this.#nodes.get(0);
    while (node.active !== null) {
      node = this.#nodes.get(node.active);
      found.push(node);
    }
    return found;
  }

  get last() {
    return this.path.at(-1)?.id ?? 0;
  }

  /** Where a message stands among the branches: [its number from 1, how many]. */
  place(id) {
    const { children } = this.#nodes.get(this.#nodes.get(id).parent);
    return [children.indexOf(id) + 1, children.length];
  }

  /** Show the branch before (-1) or after (1) this message's. */
  turn(id, step) {
    const above = this.#nodes.get(this.#nodes.get(id).parent);
    const wanted = above.children[above.children.indexOf(id) + step];
    if (wanted !== undefined) above.active = wanted;
  }

  /** What the API is sent: the messages up to this one, and the system's. */
  messages(upTo, system) {
    const found = [];
    for (let node = this.#nodes.get(upTo); node?.id; node = this.#nodes.get(node.parent))
      found.unshift(toApi(node));
    if (system) found.unshift({ role: "system", content: system });
    return found;
  }

  toJSON() {
    return [...this.#nodes.values()];
  }

  /** Throws TypeError if it is none. */
  static from(nodes) {
    const made = new Conversation();
    if (!Array.isArray(nodes) || nodes[0]?.id !== 0) throw new TypeError("not a conversation");
    made.#nodes = new Map(nodes.map((node) => [node.id, node]));
    for (const { id, parent, children } of nodes)
      if ((id && !made.#nodes.has(parent)) || children.some((one) => !(one > id)))
        throw new TypeError("not a conversation");
    made.#next = 1 + Math.max(...made.#nodes.keys());
    return made;
  }
}

function toApi({ role, content, calls, callId, pictures, clip }) {
  if (role === "tool") return { role, content, tool_call_id: callId };
  if (role === "assistant" && calls?.length)
    return { role, content: content || null, tool_calls: calls };
  if (pictures?.length) {
    const parts = clip
      ? [{ type: "video", video: pictures }]
      : pictures.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role, content: content ? [...parts, { type: "text", text: content }] : parts };
  }
  return { role, content: content ?? "" };
}
