// The page begins here: views by the address's hash, the key, the theme and the keyboard.

import { key, told } from "./api.js";
import { Chat } from "./chat/chat.js";
import { Compare } from "./chat/compare.js";
import { Completions } from "./chat/completions.js";
import { button, element } from "./dom.js";
import { Live } from "./look/live.js";
import { refresh } from "./models.js";
import { Timeline } from "./look/timeline.js";

const VIEWS = { chat: Chat, completions: Completions, compare: Compare, live: Live, request: Timeline };
const NAMES = Object.keys(VIEWS);
const made = {}; // by name: a view is made when it is first looked at
const THEME = "manta-theme";

function show() {
  const [wanted, argument] = location.hash.slice(1).split("=");
  const name = VIEWS[wanted] ? wanted : "chat";
  for (const other of NAMES) {
    document.getElementById(other).hidden = other !== name;
    const link = document.querySelector(`nav a[href="#${other}"]`);
    if (other === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    if (other !== name) made[other]?.hide?.();
  }
  const view = (made[name] ??= new VIEWS[name](document.getElementById(name)));
  view.show?.(argument);
  view.focus?.();
  return view;
}

const shown = () => made[NAMES.find((name) => !document.getElementById(name).hidden)];

// -- the key

function askKey(why = "") {
  const input = element("input", { type: "password", autocomplete: "off", value: key.get() });
  const take = (event) => {
    event.preventDefault();
    key.set(input.value.trim());
    dialog.close();
    start();
    show(); // what was refused without it
  };
  const buttons = [
    element("button", { textContent: "Use" }),
    button("Cancel", () => dialog.close()),
  ];
  const dialog = openDialog(
    element(
      "form",
      { on: { submit: take } },
      element("p", {}, why || "It is kept in this tab only, and forgotten with it."),
      element("label", {}, "API key", input),
      element("div", { className: "row" }, ...buttons),
    ),
  );
}

function openDialog(...content) {
  const open = document.querySelector("dialog");
  if (open) open.remove();
  const dialog = element("dialog", { on: { close: () => dialog.remove() } }, ...content);
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

document.addEventListener("key-wanted", () => {
  if (document.querySelector("dialog")) return;
  askKey(key.get() ? "The server does not know this key." : "The server wants a key.");
});

// -- light and dark

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

function turnTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const now = document.documentElement.dataset.theme ?? dark;
  const next = now === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, next);
  setTheme(next);
}

// -- the keyboard

const KEYS = [
  ["Enter", "send; Shift and Enter begin a line"],
  ["Esc", "stop what is coming"],
  ["↑", "edit the last message, in an empty box"],
  ["Alt 1 to 5", "the views"],
  ["/", "go to the box"],
  ["?", "this list"],
];

function help() {
  const dialog = openDialog(
    element("table", {}, ...KEYS.map(([name, what]) =>
      element("tr", {}, element("td", {}, element("kbd", {}, name)), element("td", {}, what)),
    )),
    element("div", { className: "row" }, button("Close", () => dialog.close())),
  );
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea, select, dialog");
  if (event.altKey && /^Digit[1-9]$/.test(event.code) && NAMES[event.code.at(-1) - 1]) {
    event.preventDefault();
    location.hash = NAMES[event.code.at(-1) - 1];
  } else if (event.key === "Escape" && !document.querySelector("dialog")) shown()?.stop?.();
  else if (event.key === "/" && !typing) {
    event.preventDefault();
    shown()?.focus?.();
  } else if (event.key === "?" && !typing) help();
});

// -- the beginning

async function start() {
  const bar = document.getElementById("trouble");
  bar?.remove();
  try {
    await refresh();
  } catch (error) {
    const again = button("Again", start);
    const text = element("div", { id: "trouble", role: "alert" }, told(error), again);
    document.querySelector("header").after(text);
  }
}

setTheme(localStorage.getItem(THEME));
document.getElementById("theme").addEventListener("click", turnTheme);
document.getElementById("key").addEventListener("click", () => askKey());
document.getElementById("help").addEventListener("click", help);
addEventListener("hashchange", show);
show();
start();
