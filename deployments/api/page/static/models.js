// What is served, as /v1/models has it now, and choices of it that follow it.

import { getJson } from "./api.js";
import { element } from "./dom.js";

let served = []; // as of the last look
const choices = new Set();

export const models = () => served;

/** Ask again what is served. Throws what getJson throws. */
export async function refresh() {
  served = (await getJson("v1/models")).data;
  for (const fill of choices) fill();
}

/** A select of the models: each base with its adapters. It keeps its choice while that is served. */
export function modelChoice(label, wanted = () => undefined) {
  const select = element("select", { aria: { label } });
  const option = ({ id, status }) =>
    element("option", { value: id, textContent: status === "starting" ? `${id} (starting)` : id });
  const fill = () => {
    const before = select.value || wanted();
    const groups = served
      .filter(({ parent }) => !parent)
      .map((base) => [base, served.filter(({ parent }) => parent === base.id)]);
    select.replaceChildren(
      ...groups.map(([base, adapters]) =>
        adapters.length
          ? element("optgroup", { label: base.id }, ...[base, ...adapters].map(option))
          : option(base),
      ),
    );
    if (served.some(({ id }) => id === before)) select.value = before;
    select.dispatchEvent(new Event("filled"));
  };
  choices.add(fill);
  fill();
  select.addEventListener("focus", () => refresh().catch(() => {}));
  select.forget = () => choices.delete(fill);
  return select;
}
