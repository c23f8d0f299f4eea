"""Signing in to the search page: the key is put into a cookie that scripts cannot read and other sites cannot send."""

from fastapi import APIRouter, Request, Response, status

from hashseek.api.access.limits import COOKIE, secret_of
from hashseek.api.messages.schemas import Session
from hashseek.api.routes.dependencies import NoQueryDep

router = APIRouter(prefix="/v1/session", tags=["service"], dependencies=[NoQueryDep])


@router.get("")
async def get_session(request: Request) -> Session:
    """Which key the request has, and what it may do."""
    key = getattr(request.state, "key", None)
    return Session(key=key.name, role=key.role) if key else Session(key=None, role="admin")


@router.post("")
async def sign_in(request: Request, response: Response) -> Session:
    """Keep the key from the header `Authorization: Bearer KEY` in a cookie until the browser is closed."""
    answer = await get_session(request)
    secret = secret_of(request)
    if answer.key and secret:
        https = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
        response.set_cookie(COOKIE, secret, path="/", httponly=True, samesite="strict", secure=https)
    return answer


@router.delete("", status_code=status.HTTP_204_NO_CONTENT)
async def sign_out(response: Response) -> None:
    """Remove the cookie."""
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
