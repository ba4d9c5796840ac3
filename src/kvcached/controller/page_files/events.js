// SPDX-License-Identifier: Apache-2.0
// An event stream of the OpenAI API, from bytes to pieces of text. Pure, but for the stream that it reads.

// The data of each event, whatever the chunks.
export async function* dataOf(stream) {
  const decoder = new TextDecoder();
  const reader = stream.getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "" && data.length) yield data.join("\n");
        data = line === "" ? [] : withLine(data, line);
      }
      if (done) return;
    }
  } finally {
    await reader.cancel();
  }
}

const withLine = (data, line) => (line.startsWith("data:") ? [...data, line.slice(5).replace(/^ /, "")] : data);

// {text}, {thought} or {problem} of each event that has one.
export async function* piecesOf(stream) {
  let done = false;
  for await (const data of dataOf(stream)) {
    done ||= data === "[DONE]"; // and read on: a stream that is left before its end counts as one that failed
    const piece = done ? null : pieceOf(data);
    if (piece) yield piece;
  }
}

function pieceOf(data) {
  let event;
  try {
    event = JSON.parse(data);
  } catch {
    return { problem: `no JSON: ${data.slice(0, 200)}` };
  }
  if (event?.error) return { problem: event.error.message ?? JSON.stringify(event.error) };
  const delta = event?.choices?.[0]?.delta ?? {};
  if (delta.content) return { text: delta.content };
  const thought = delta.reasoning_content ?? delta.reasoning;
  return thought ? { thought } : null;
}
