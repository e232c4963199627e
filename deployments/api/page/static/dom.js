// element: DOM nodes without HTML. Text goes in as text, and nothing else goes in.

/**
 * @param {string} tag
 * @param {Object} properties  Set on the element; `on` holds listeners by event, `data` the
 *   dataset, `aria` the aria- attributes.
 * @param {...(Node|string|null)} children
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  const { on = {}, data = {}, aria = {}, ...plain } = properties;
  for (const [event, listener] of Object.entries(on)) made.addEventListener(event, listener);
  for (const [name, value] of Object.entries(aria)) made.setAttribute(`aria-${name}`, value);
  Object.assign(made.dataset, data);
  Object.assign(made, plain);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A button that does something. */
export function button(label, click, title = "") {
  return element("button", { type: "button", textContent: label, title, on: { click } });
}

const SVG = "http://www.w3.org/2000/svg";

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** An SVG text with a tooltip. */
export function svgTitle(text) {
  const made = svg("title");
  made.textContent = text;
  return made;
}

/** Calls `work` at most once a frame, with the last state. */
export function eachFrame(work) {
  let due = false;
  return () => {
    if (due) return;
    due = true;
    const run = () => {
      due = false;
      work();
    };
    // A hidden tab has no frames, and its text should be there when it is looked at.
    if (document.hidden) setTimeout(run, 100);
    else requestAnimationFrame(run);
  };
}

/** Keep a scrolled box at its end, unless its reader has scrolled up. */
export function atEnd(box, change) {
  const stay = box.scrollHeight - box.scrollTop - box.clientHeight < 48;
  change();
  if (stay) box.scrollTop = box.scrollHeight;
}

/** Copy a text, and say on the button that asked for it what came of that. */
export async function copy(text, told) {
  const before = told.textContent;
  told.textContent = (await put(text)) ? "Copied" : "Not allowed";
  setTimeout(() => (told.textContent = before), 1500);
}

async function put(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Over plain HTTP from another machine there is the old way only.
    const box = element("textarea", { value: text });
    document.body.append(box);
    box.select();
    const done = document.execCommand("copy");
    box.remove();
    return done;
  }
}
