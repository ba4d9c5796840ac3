// SPDX-License-Identifier: Apache-2.0
// A question before what hurts.

import { byId, make } from "./dom.js";

// `answers`: {label: value}, the harmless one first; `field`: {label, value, type} for text. Returns {answer, text}, or null.
export function ask(title, text, answers, field = null) {
  const dialog = byId("question");
  if (dialog.open) return Promise.resolve(null); // one at a time
  byId("question-title").textContent = title;
  byId("question-text").textContent = text;
  byId("question-problem").textContent = "";
  byId("question-field").hidden = field === null;
  byId("question-label").textContent = field?.label ?? "";
  const input = byId("question-input");
  input.type = field?.type ?? "text";
  input.value = field?.value ?? "";
  return new Promise((resolve) => {
    let said = null;
    const close = (answer) => {
      said = answer === null ? null : { answer, text: input.value.trim() };
      dialog.close();
    };
    const first = Object.values(answers)[0];
    byId("question-form").onsubmit = (event) => {
      event.preventDefault();
      close(first);
    };
    const buttons = Object.entries(answers).map(([label, value], index) =>
      make("button", { type: index ? "button" : "submit", text: label, on: index ? { click: () => close(value) } : {} }),
    );
    byId("question-answers").replaceChildren(...buttons, make("button", { type: "button", text: "Cancel", on: { click: () => close(null) } }));
    dialog.onclose = () => {
      input.value = "";
      resolve(said);
    };
    dialog.showModal();
    if (field) input.focus();
  });
}
