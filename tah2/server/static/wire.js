// From settings to a request, and from chunks of the API to tokens of the page.

import { passes } from "./format.js";

const TOP = 5; // predictions per depth

// What the page needs to know of a served model (an entry of /v1/models).
export function factsOf(model) {
  const loop = model.loop ?? {};
  const maxDepth = loop.max_depth ?? 1;
  return {
    name: model.id,
    maxDepth,
    exitThreshold: loop.exit_threshold ?? 0.5,
    gated: loop.gated ?? false,
    depthLogprobs: loop.depth_logprobs ?? false,
    summary: `${model.id}${loop.kind ? `, ${loop.kind}, at most ${passes(maxDepth)}` : ""}`,
    path: "v1/chat/completions",
  };
}

export function request(facts, column, system, drawn) {
  const opening = system ? [{ role: "system", content: system }] : [];
  return {
    model: facts.name,
    messages: [...opening, ...column.messages],
    ...drawn,
    ...column.setting,
    logprobs: true,
    top_logprobs: TOP,
    return_depths: true,
    ...(facts.depthLogprobs ? { return_depth_logprobs: true } : {}),
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
}

// Tokens, usage and the reason of the end that one chunk brings.
export function newsOf(chunk) {
  const choice = chunk.choices?.[0];
  const usage = chunk.usage ?? null;
  if (!choice) return { tokens: [], usage, finish: null };
  const reasoning = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
  const text = reasoning || (choice.delta?.content ?? "");
  const depths = choice.depths ?? [];
  const entries = choice.logprobs?.content ?? [];
  const tokens = split(text, depths.length, entries).map((piece, at) => ({
    text: piece,
    depth: depths[at] ?? 1,
    reasoning: reasoning !== "",
    continueProbs: choice.continue_probs?.[at] ?? [],
    top: entries[at]?.top_logprobs ?? [],
    perDepth: choice.depth_logprobs?.[at] ?? [],
  }));
  return { tokens, usage, finish: choice.finish_reason ?? null };
}

// The text of a chunk over its tokens. Where they do not add up to it (half characters, a held-back stop string), it
// goes to the last token.
function split(text, count, entries) {
  if (count === 0) return text === "" ? [] : [text];
  const each = entries.map((entry) => entry.token);
  if (each.length === count && each.join("") === text) return each;
  return [...Array(count - 1).fill(""), text];
}
