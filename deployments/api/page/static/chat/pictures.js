// Pictures that go with the next message: pasted, dropped, or chosen. They are data: URLs.

import { button, element } from "../dom.js";

export class Pictures {
  constructor(changed) {
    this.urls = [];
    this.changed = changed;
    this.node = element("div", { className: "row pictures", hidden: true });
  }

  /** Take the images of a paste or a drop; return whether there were any. */
  take(transfer) {
    const files = [...(transfer?.files ?? [])].filter(({ type }) => type.startsWith("image/"));
    this.#add(files);
    return files.length > 0;
  }

  choose() {
    const take = ({ target }) => this.#add([...target.files]);
    element("input", { type: "file", accept: "image/*", multiple: true, on: { change: take } }).click();
  }

  /** The pictures for a message, which are gone here then. */
  give() {
    const given = this.urls;
    this.urls = [];
    this.#draw();
    return given;
  }

  async #add(files) {
    this.urls.push(...(await Promise.all(files.map(dataUrl))));
    this.#draw();
    this.changed();
  }

  #draw() {
    this.node.hidden = this.urls.length === 0;
    this.node.replaceChildren(
      ...this.urls.map((url, at) => {
        const drop = () => {
          this.urls.splice(at, 1);
          this.#draw();
        };
        return element("figure", {}, picture(url), button("×", drop, "Without this picture"));
      }),
    );
  }
}

/** A picture of the conversation. */
export function picture(url) {
  return element("img", { src: url, alt: "picture" });
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
