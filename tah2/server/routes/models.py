"""What is served, and its tokenizer."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tah2.server.protocol.answers import ModelCard, ModelList, Text, TokenizerInfo, Tokens
from tah2.server.protocol.requests import DetokenizeRequest, TokenizeRequest
from tah2.server.routes.schema import described
from tah2.server.service import Service, service_of
from tah2.server.transport import answer, check, read

router = APIRouter(tags=["models"])


@router.get("/v1/models", openapi_extra=described(None, ModelList))
async def models(request: Request) -> Response:
    service = service_of(request)
    return answer(ModelList([_card(service, name) for name in service.model_names]))


@router.get("/v1/models/{model:path}", openapi_extra=described(None, ModelCard, also=("404",)))
async def model(request: Request, model: str) -> Response:
    service = service_of(request)
    return answer(_card(service, service.check_model(model)))


@router.post("/tokenize", openapi_extra=described(TokenizeRequest, Tokens))
async def tokenize(request: Request) -> Response:
    """Of a `prompt`, or of `messages` through the chat template."""
    asked, service = await read(request, TokenizeRequest), service_of(request)
    service.check_model(asked.model)
    check((asked.prompt is None) != (asked.messages is None), "Give either 'prompt' or 'messages'.", "prompt")
    return answer(await asyncio.to_thread(_tokens, service, asked))


@router.post("/detokenize", openapi_extra=described(DetokenizeRequest, Text))
async def detokenize(request: Request) -> Response:
    asked, service = await read(request, DetokenizeRequest), service_of(request)
    service.check_model(asked.model)
    size = service.facts.vocab_size
    check(all(token < size for token in asked.tokens), f"Token ids must lie below {size}.", "tokens")
    text: str = await asyncio.to_thread(
        service.tokenizer.decode,
        asked.tokens,
        skip_special_tokens=bool(asked.skip_special_tokens),
        clean_up_tokenization_spaces=False,
    )
    return answer(Text(text))


@router.get("/tokenizer_info", openapi_extra=described(None, TokenizerInfo))
async def tokenizer_info(request: Request) -> Response:
    """What evaluation harnesses need to build prompts without the hub."""
    service = service_of(request)
    tokenizer: Any = service.tokenizer
    return answer(
        TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__,
            vocab_size=len(tokenizer),
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            pad_token=tokenizer.pad_token,
            unk_token=tokenizer.unk_token,
            chat_template=service.renderer.source or None,
        )
    )


def _tokens(service: Service, asked: TokenizeRequest) -> Tokens:
    ids = _encode(service, asked)
    names = [service.table.text_of(token) for token in ids] if asked.return_token_strs else None
    return Tokens(ids, len(ids), service.facts.max_model_len, names)


def _encode(service: Service, asked: TokenizeRequest) -> list[int]:
    if asked.prompt is not None:
        service.renderer.bound(asked.prompt, "prompt", whole=False)
        return service.renderer.text(asked.prompt, asked.add_special_tokens is not False)
    tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or []]
    return service.renderer.chat(asked.conversation(), tools, {}).ids


def _card(service: Service, name: str) -> ModelCard:
    facts = service.facts
    return ModelCard(
        id=name,
        created=service.started,
        root=service.engine.config.model,
        max_model_len=facts.max_model_len,
        loop=facts.loop,
        max_depth=facts.max_depth,
        exit_threshold=facts.exit_threshold,
        gated=facts.gated,
        depth_logprobs=facts.depth_logprobs,
        parameters=facts.parameters,
    )
