// SPDX-License-Identifier: Apache-2.0
// The gateway, asked with the reader's key. The key is kept as long as this tab.

const KEY = "kvcached-api-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const keepKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

// Raises Refused with what the gateway says, TypeError when nobody answers.
async function ask(path, options = {}) {
  const response = await fetch(`../${path}`, { ...options, headers: headers(options.headers ?? {}), cache: "no-store" });
  if (!response.ok) throw new Refused(response.status, problemOf(await response.text(), response.status));
  return response;
}

function problemOf(text, status) {
  try {
    return messageOf(JSON.parse(text)) ?? `status ${status}`;
  } catch {
    return text.slice(0, 300) || `status ${status}`;
  }
}

const messageOf = (body) => body?.error?.message ?? body?.message;

export const read = async (path) => (await ask(path)).json();

const act = async (what, model, query) =>
  (await ask(`action/${what}/${encodeURIComponent(model)}?${new URLSearchParams(query)}`, { method: "POST" })).json();

export const sleep = (model, mode) => act("sleep", model, { mode });
export const wake = (model) => act("wakeup", model, {});
export const limit = (model, amount) => act("limit", model, { limit: amount });

export async function chat(model, messages, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model, messages, stream: true }),
    signal,
  });
  return response.body;
}
