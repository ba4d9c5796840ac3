// SPDX-License-Identifier: Apache-2.0
// A conversation with one model. It is kept only here.

import * as api from "./api.js";
import { byId, make, setOptions } from "./dom.js";
import { piecesOf } from "./events.js";

const MOST_MESSAGES = 100;

export class Chat {
  #messages = [];
  #abort = null;

  constructor() {
    byId("chat-form").addEventListener("submit", (event) => this.#submit(event));
    byId("chat-text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) this.#submit(event);
    });
    byId("chat-stop").addEventListener("click", () => this.#abort?.abort());
    byId("chat-clear").addEventListener("click", () => this.#clear());
  }

  offer(names) {
    setOptions(byId("chat-model"), names);
  }

  choose(model) {
    byId("chat-model").value = model;
    byId("chat-text").focus();
  }

  #clear() {
    this.#abort?.abort();
    this.#messages = [];
    byId("conversation").replaceChildren();
  }

  #submit(event) {
    event.preventDefault();
    const text = byId("chat-text").value.trim();
    if (!text || this.#abort) return;
    byId("chat-text").value = "";
    this.#say("You").text.append(text);
    this.#remember({ role: "user", content: text });
    this.#answer(byId("chat-model").value);
  }

  async #answer(model) {
    const abort = (this.#abort = new AbortController());
    const messages = this.#messages;
    const turn = this.#say(model);
    this.#busy(true);
    try {
      for await (const piece of piecesOf(await api.chat(model, messages, abort.signal))) this.#write(turn, piece);
    } catch (error) {
      turn.item.append(make("span", { name: "problem", text: abort.signal.aborted ? " (stopped)" : error.message }));
    } finally {
      this.#abort = null;
      this.#busy(false);
    }
    if (messages === this.#messages) this.#conclude(turn.text.textContent);
  }

  // A question without an answer is not asked again with the next.
  #conclude(content) {
    if (content) this.#remember({ role: "assistant", content });
    else this.#messages.pop();
  }

  #write(turn, piece) {
    if (piece.problem) turn.item.append(make("span", { name: "problem", text: piece.problem }));
    turn.thought.append(piece.thought ?? "");
    turn.text.append(piece.text ?? "");
    this.#scroll();
  }

  #say(who) {
    const thought = make("span", { name: "thought" });
    const text = make("span", { name: "said" });
    const item = make("li", { name: "turn" }, make("span", { name: "who", text: who }), thought, text);
    const list = byId("conversation");
    list.append(item);
    while (list.childElementCount > MOST_MESSAGES) list.firstElementChild.remove();
    this.#scroll();
    return { item, thought, text };
  }

  #scroll() {
    const list = byId("conversation");
    list.scrollTop = list.scrollHeight;
  }

  #remember(message) {
    this.#messages.push(message);
    while (this.#messages.length > MOST_MESSAGES) this.#messages.splice(0, 2);
  }

  #busy(busy) {
    byId("conversation").setAttribute("aria-busy", String(busy));
    byId("chat-stop").hidden = !busy;
    byId("chat-send").hidden = busy;
  }
}
