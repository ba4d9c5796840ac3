// SPDX-License-Identifier: Apache-2.0
// Elements from data. Text is only ever set as text.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function make(tag, { text, name, on = {}, ...attributes } = {}, ...children) {
  return dress(document.createElement(tag), { text, name, on, ...attributes }, children);
}

export function makeSvg(tag, attributes = {}, ...children) {
  return dress(document.createElementNS(SVG, tag), attributes, children);
}

function dress(element, { text, name, on = {}, ...attributes }, children) {
  if (name) element.setAttribute("class", name);
  if (text !== undefined) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  for (const [event, handler] of Object.entries(on)) element.addEventListener(event, handler);
  element.append(...children);
  return element;
}

// Only what differs is touched: a reader's selection and a screen reader's place stay.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setOptions(select, names) {
  const known = [...select.options].map((option) => option.value);
  if (known.length === names.length && known.every((name, index) => name === names[index])) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => make("option", { value: name, text: name })));
  if (names.includes(chosen)) select.value = chosen;
}

// What a button does not do now is told, and it keeps the focus.
export function setEnabled(button, enabled) {
  button.setAttribute("aria-disabled", String(!enabled));
}

export const isEnabled = (button) => button.getAttribute("aria-disabled") !== "true";
