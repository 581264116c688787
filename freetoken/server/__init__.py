"""llama-server's HTTP interface. Knows `request.Generator`, the tokenizer and the templates; never the engine or torch.

`app` builds the Flask application around a `state.ServerState`, `listen` serves it. A completion goes
`routes` -> `prompts` or `chat` (what to run) -> `schema` (how) -> `generation` (events to text) -> `answers` (JSON) ->
`sse` where it streams.
"""
