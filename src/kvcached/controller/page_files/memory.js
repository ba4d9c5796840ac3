// SPDX-License-Identifier: Apache-2.0
// One graph for each card: who held how much of it.

import { byId, make, makeSvg, setText } from "./dom.js";
import { History, bytesByModel } from "./history.js";
import { duration, size } from "./words.js";

const WIDTH = 600;
const HEIGHT = 160;
const COLOURS = 8;

export class Memory {
  #plots = new Map();
  #colours = new Map();

  show({ cards, problems }) {
    byId("no-cards").hidden = cards.length > 0 && !problems.length;
    setText(byId("no-cards"), problems.join("; ") || "No elastic engine has opened a card yet.");
    for (const card of cards) this.#plot(card).show(card, performance.now());
    for (const [uuid, plot] of this.#plots) if (!cards.some((card) => card.uuid === uuid)) this.#remove(uuid, plot);
  }

  #plot(card) {
    if (!this.#plots.has(card.uuid)) {
      const plot = new Plot((model) => this.#colour(model));
      this.#plots.set(card.uuid, plot);
      byId("card-list").append(plot.element);
    }
    return this.#plots.get(card.uuid);
  }

  #remove(uuid, plot) {
    plot.element.remove();
    this.#plots.delete(uuid);
  }

  #colour(model) {
    if (model === "") return "c-other";
    if (!this.#colours.has(model)) this.#colours.set(model, `c${this.#colours.size % COLOURS}`);
    return this.#colours.get(model);
  }
}

class Plot {
  #history = new History();
  #title = make("h3");
  #picture = makeSvg("svg", { name: "plot", role: "img", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" });
  #begin = make("span");
  #swatches = make("ul", { name: "swatches" });

  constructor(colourOf) {
    this.colourOf = colourOf;
    const ends = make("div", { name: "ends" }, this.#begin, make("span", { text: "now" }));
    this.element = make("div", { name: "card" }, this.#title, this.#picture, ends, this.#swatches);
  }

  show(card, nowMs) {
    const parts = bytesByModel(card);
    this.#history.add(nowMs, parts);
    const models = this.#history.models().sort();
    const layers = this.#history.layers(models, card.budget_bytes, WIDTH, HEIGHT);
    setText(this.#title, card.problem ? `${card.card}: ${card.problem}` : `${card.card}: ${size(card.leased_bytes)} of ${size(card.budget_bytes)}`);
    setText(this.#begin, `${duration(this.#history.spanMs / 1000)} ago`);
    this.#picture.setAttribute("aria-label", [this.#title.textContent, ...models.map((model) => said(card, model, parts))].join("; "));
    this.#picture.replaceChildren(...layers.map((points, index) => makeSvg("polygon", { name: this.colourOf(models[index]), points: points.join(" ") })));
    this.#swatches.replaceChildren(...models.map((model) => make("li", {}, swatch(this.colourOf(model)), said(card, model, parts))));
  }
}

const swatch = (colour) => makeSvg("svg", { name: "swatch", "aria-hidden": "true" }, makeSvg("rect", { name: colour, width: "100%", height: "100%" }));

function said(card, model, parts) {
  const pools = card.pools.filter((pool) => (pool.model ?? "") === model);
  const sum = (key) => pools.reduce((total, pool) => total + pool[key], 0);
  const facts = [["used_bytes", "used"], ["cached_bytes", "cached"], ["other_bytes", "weights and other"]];
  const details = facts.filter(([key]) => sum(key)).map(([key, word]) => `${size(sum(key))} ${word}`);
  return `${model || "others"}: ${size(parts.get(model) ?? 0)}${details.length ? ` (${details.join(", ")})` : ""}`;
}
