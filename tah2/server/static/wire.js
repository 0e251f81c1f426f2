// From settings to a request, and from chunks of the API to tokens of the page.

import { passes } from "./format.js";

const TOP = 5; // predictions per depth

// What the page needs to know of a served model: its entry of /v1/models, and whether it has a chat template.
export function factsOf(model, chats) {
  return {
    name: model.id,
    maxDepth: model.max_depth,
    exitThreshold: model.exit_threshold,
    gated: model.gated,
    depthLogprobs: model.depth_logprobs,
    chats,
    summary: `${model.id} · ${model.loop}, at most ${passes(model.max_depth)}${chats ? "" : " · no chat template: it continues your text"}`,
  };
}

// Address and body of the request for `column`'s next answer. Without a chat template the text so far is continued.
export function request(facts, column, system, drawn) {
  const shared = {
    model: facts.name,
    ...drawn,
    ...column.setting,
    return_depths: true,
    return_continue_probs: true,
    ...(facts.depthLogprobs ? { depth_logprobs: TOP } : {}),
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  const opening = system ? [{ role: "system", content: system }] : [];
  const messages = [...opening, ...column.messages];
  return facts.chats
    ? ["v1/chat/completions", { ...shared, messages, logprobs: true, top_logprobs: TOP }]
    : ["v1/completions", { ...shared, prompt: continued(messages), logprobs: TOP }];
}

// One text of all turns: what was written follows what was answered.
function continued(messages) {
  return messages.reduce((text, { role, content }) => {
    const apart = text && role !== "assistant" && !text.endsWith("\n") ? "\n" : "";
    return text + apart + content;
  }, "");
}

// Tokens, usage and the reason of the end that one chunk brings.
export function newsOf(chunk) {
  const choice = chunk.choices?.[0];
  const usage = chunk.usage ?? null;
  if (!choice) return { tokens: [], usage, finish: null };
  const reasoning = choice.delta?.reasoning_content ?? "";
  const text = reasoning || (choice.delta?.content ?? choice.text ?? "");
  const depths = choice.depths ?? [];
  const entries = entriesOf(choice.logprobs);
  const tokens = split(text, depths.length, entries).map((piece, at) => ({
    text: piece,
    depth: depths[at] ?? 1,
    counted: at < depths.length, // what was held back comes with no token of its own
    reasoning: reasoning !== "",
    chosen: entries[at]?.token ?? piece,
    continueProbs: choice.continue_probs?.[at] ?? [],
    top: entries[at]?.top ?? [],
    perDepth: (choice.depth_logprobs?.[at] ?? []).map(withChosen),
  }));
  return { tokens, usage, finish: choice.finish_reason ?? null };
}

// The most probable tokens, and at their end the chosen one where it is not among them.
function withChosen({ token, logprob, top_logprobs: top }) {
  return top.some((entry) => entry.token === token) ? top : [...top, { token, logprob }];
}

// Token and most probable tokens of every position, from the chat's or the completions' form.
function entriesOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map((entry) => ({ token: entry.token, top: withChosen(entry) }));
  const best = (row) => Object.entries(row ?? {}).map(([token, logprob]) => ({ token, logprob })).sort((a, b) => b.logprob - a.logprob);
  return logprobs.tokens.map((token, at) => ({ token, top: best(logprobs.top_logprobs?.[at]) }));
}

// The text of a chunk over its tokens. Where they do not add up to it (half characters, a held-back stop string), it
// goes to the last token.
function split(text, count, entries) {
  if (count === 0) return text === "" ? [] : [text];
  const each = entries.map((entry) => entry.token);
  if (each.length === count && each.join("") === text) return each;
  return [...Array(count - 1).fill(""), text];
}
