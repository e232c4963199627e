// Pictures that go with the next message: pasted, dropped, or chosen. They are data: URLs, and may be
// the frames of one clip.

import { button, element } from "../dom.js";

export class Pictures {
  #clips = false; // whether the model takes clips

  /** changed: called when there are more; fail: called with what is wrong. */
  constructor(changed, fail) {
    this.urls = [];
    this.changed = changed;
    this.fail = fail;
    this.box = element("input", { type: "checkbox" });
    this.label = element("label", { className: "check" }, this.box, "One clip, 2 frames a second");
    this.node = element("div", { className: "row pictures", hidden: true });
  }

  /** Take the images of a paste or a drop; return whether there were files for the model. */
  take(transfer) {
    const files = [...(transfer?.files ?? [])];
    const video = files.find(({ type }) => type.startsWith("video/"));
    if (video) {
      this.fail(`Video files are not decoded: ${video.name}. Take its frames as pictures instead.`);
      return true;
    }
    const images = files.filter(({ type }) => type.startsWith("image/"));
    this.#add(images);
    return images.length > 0;
  }

  /** Let several pictures be a clip, where the model takes clips. */
  offerClips(offered) {
    this.#clips = offered;
    this.#draw();
  }

  choose() {
    const take = ({ target }) => this.#add([...target.files]);
    element("input", { type: "file", accept: "image/*", multiple: true, on: { change: take } }).click();
  }

  get #areClip() {
    return this.#clips && this.urls.length > 1;
  }

  /** The pictures for a message, which are gone here then, and whether they are one clip. */
  give() {
    const message = { pictures: this.urls, clip: this.#areClip && this.box.checked };
    this.urls = [];
    this.box.checked = false;
    this.#draw();
    return message;
  }

  /** Add files in the order of their names, which those of frames have. */
  async #add(files) {
    files.sort((a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }));
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
      ...(this.#areClip ? [this.label] : []),
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
