// From chunks of the API to tokens of the page.

const TOP = 5; // predictions per depth

export function requestBody(facts, column, sampling) {
  const drawn = {
    model: facts.name,
    ...sampling,
    ...column.setting,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_depths: true,
  };
  return drawn;
}
