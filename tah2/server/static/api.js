// The server's API: which model it serves, and answers as they are written.

export class ApiError extends Error {
  constructor(message, status = 0, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?");
  }
}

// An error of the API in plain words.
async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  const said = body.error?.message ?? "";
  const wait = response.headers.get("Retry-After");
  const words = {
    401: "This server needs an API key: enter it below, then send again.",
    404: said || "The server does not know this address.",
    413: "The message is larger than the server takes.",
    429: `The server is busy${wait ? `; try again in ${wait} seconds` : "; try again in a moment"}.`,
    503: said || "The server is not ready; try again in a moment.",
  }[response.status];
  return new ApiError(words ?? (said || `The server failed (${response.status}).`), response.status, body.error?.param ?? null);
}

// An answer that comes at once.
export async function get(path, key) {
  const response = await reach(path, { headers: headers(key) });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

// Chunks of one streamed answer.
export async function* stream(path, body, key, signal) {
  const response = await reach(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.code ?? 0);
    yield chunk;
  }
  throw new ApiError("The connection ended before the answer did.");
}

// The data of server-sent events.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const whole = text.split(/\r?\n\r?\n/);
      text = whole.pop();
      for (const event of whole) {
        const data = event.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
