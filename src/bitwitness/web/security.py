"""Who gets in: every request passes here before any page sees it, so that no page can forget to ask.

A console on 127.0.0.1 is reached by every page that is open in the same browser. So a request must be addressed to a name of ours
(DNS rebinding), must not come from a page of somebody else, and one that changes something must carry what only our own pages know.
Where nothing may be changed, nothing but signing in and out is taken by POST, whoever asks.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import parse_qs, urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bitwitness.web import links
from bitwitness.web.hashing import same
from bitwitness.web.rendering import problem, render, wants_page
from bitwitness.web.sessions import Session, Sessions
from bitwitness.web.settings import Settings
from bitwitness.web.signing import Refused, Signing
from bitwitness.web.users import Role

COOKIE, NONCE, BROWSER = "bitwitness", "bitwitness-form", "bitwitness-browser"
READ_ONLY = (
    "this console only shows: whoever runs it starts it with --allow-actions to act from here; "
    "`bitwitness fleet`, `quarantine` and `incident` do the same on the command line"
)
_PATH, _QUERY, _BODY = 8 << 10, 4 << 10, 64 << 10
_PUBLIC = ("/login", "/healthz")
_FORMS = ("application/x-www-form-urlencoded", "application/json")


def signed_in(request: Request) -> Session | None:
    """Who asks, if that is known."""
    session: Session | None = getattr(request.state, "session", None)
    return session


def require(request: Request, role: Role = "viewer") -> Session:
    """Who asks, who must have a role; an operator may all that a viewer may.

    Raises:
        HTTPException: 401 where nobody is signed in, 403 where the role is not enough.
    """
    session = signed_in(request)
    if session is None:
        raise HTTPException(401, "sign in first")
    if role == "operator" and session.role != "operator":
        raise HTTPException(403, f"{session.name} is a viewer: acting needs an operator")
    return session


def acting(request: Request) -> Session:
    """The operator who acts; a dependency of everything that shows or does an act.

    Raises:
        HTTPException: 403 where this console only shows, else as `require`.
    """
    settings: Settings = request.app.state.settings
    if not settings.allow_actions:
        raise HTTPException(403, READ_ONLY)
    return require(request, "operator")


class Guard:
    """Middleware: lets a request through, or answers it."""

    def __init__(self, app: ASGIApp, settings: Settings, sessions: Sessions, signing: Signing) -> None:
        self._app, self._settings, self._sessions, self._signing = app, settings, sessions, signing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at the request; who asks stands in `request.state.session` then."""
        request = Request(scope, receive)
        request.state.session = None
        try:
            answer = self._bounds(request) or await self._identify(request) or self._sign_in_first(request)
            if answer is None and request.method == "POST":
                body = await _body(request)
                answer = self._forged(request, body)
                receive = _again(body, receive)
        except HTTPException as error:
            answer = problem(request, error.status_code, error.detail, error.headers)
        except Refused as refused:
            answer = refusal(request, refused)
        except ClientDisconnect:
            return
        await (answer or self._app)(scope, receive, send)

    def _bounds(self, request: Request) -> Response | None:
        """What can be said of a request before anybody is looked up."""
        scope = request.scope
        if len(scope.get("raw_path") or b"") > _PATH or len(scope["query_string"]) > _QUERY:
            raise HTTPException(414, "the address is too long")
        if request.method not in ("GET", "POST"):
            raise HTTPException(405, "only GET, HEAD and POST are answered", {"Allow": "GET, HEAD, POST"})
        host = request.headers.getlist("host")
        if len(host) != 1 or not addressed_to_us(host[0], self._settings):
            # No page: what such a browser shows is under a name of somebody else.
            raise HTTPException(421, "this console does not go by that name: --public tells it another one")
        origins = request.headers.getlist("origin")
        if any(one != f"http://{host[0]}" and one not in self._settings.origins for one in origins):
            raise HTTPException(403, "the request comes from a page of another site")
        site, mode = request.headers.get("sec-fetch-site", ""), request.headers.get("sec-fetch-mode", "")
        foreign = site not in ("", "none", "same-origin")
        if foreign and (request.method != "GET" or mode != "navigate"):
            raise HTTPException(403, "the request comes from a page of another site")
        return None

    async def _identify(self, request: Request) -> Response | None:
        given = request.headers.getlist("authorization")
        if given:
            scheme, _, token = given[0].partition(" ")
            if len(given) > 1 or scheme.lower() != "bearer":
                raise Refused(401, "send a token as Authorization: Bearer TOKEN")
            user = await self._signing.bearer(token.strip(), client_of(request))
            request.state.session = Session(user.name, user.role, "")
            return None
        key = cookie(request, COOKIE)
        if key:
            # A page that refreshes itself is nobody at work.
            by_itself = request.url.path == "/events" or request.headers.get("hx-request") == "true"
            used = request.method == "POST" or not by_itself
            request.state.session = self._sessions.of(key, used)
        return None

    def _sign_in_first(self, request: Request) -> Response | None:
        path = request.url.path
        if self._settings.open or signed_in(request) is not None or path in _PUBLIC or path.startswith("/static/"):
            return None
        return sign_in_first(request)

    def _forged(self, request: Request, body: bytes) -> Response | None:
        """Refuse what our own pages have not sent; a program shows its token with each request, which no page can."""
        path, session = request.url.path, signed_in(request)
        if path == "/login":
            return None  # has a token of its own, because nobody is signed in
        if path != "/logout" and not self._settings.allow_actions:
            raise HTTPException(403, READ_ONLY)
        if session is None:
            return sign_in_first(request)
        if path != "/logout":
            require(request, "operator")
        if request.headers.get("authorization"):
            return None
        if not request.headers.get("origin") and not request.headers.get("sec-fetch-site"):
            raise HTTPException(403, "the request does not say from which page it comes")
        given = request.headers.get("x-csrf-token") or field(body, "csrf")
        if not session.csrf or not same(given, session.csrf):
            raise HTTPException(403, "the form is too old, or not from here: open the page again")
        return None


def sign_in_first(request: Request) -> Response:
    """Send a browser to where one signs in, and tell a program that it must."""
    if not wants_page(request) or request.headers.get("hx-request") == "true":
        return problem(request, 401, "sign in first", {"WWW-Authenticate": "Bearer"})
    here = links.own(request.url.path + (f"?{request.url.query}" if request.url.query else ""))
    if request.method == "GET" and request.headers.get("sec-fetch-site", "") in ("cross-site", "same-site"):
        # Whoever follows a link from elsewhere sends no cookie, though signed in; from our own page the browser does.
        return render(request, "login.html.jinja", again=here, after=here, form="", text="")
    return RedirectResponse(links.login("" if request.method != "GET" else here), 303)


def refusal(request: Request, refused: Refused) -> Response:
    """The answer to a secret that was not taken."""
    headers = {"Retry-After": str(refused.wait)} if refused.wait else {}
    if refused.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return problem(request, refused.status, str(refused), headers)


def addressed_to_us(host: str, settings: Settings) -> bool:
    """Whether the Host of a request is one of ours; through which port we are reached, a tunnel decides."""
    name = hostname(host)
    if name in settings.hosts:
        return True
    if "*ip" not in settings.hosts:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def hostname(host: str) -> str:
    """The name in a Host, lower case, without brackets; "" if it is none."""
    try:
        parts = urlsplit(f"//{host}")
        port_is_one = parts.port is None or True
    except ValueError:
        return ""
    clean = parts.netloc == host and parts.username is None and port_is_one
    return (parts.hostname or "").removesuffix(".") if clean else ""


def cookie(request: Request, name: str) -> str:
    """A cookie of ours: where the browser has one that only this very host over TLS can have set, that one."""
    return request.cookies.get(f"__Host-{name}") or ("" if over_tls(request) else request.cookies.get(name, ""))


def set_cookie(request: Request, answer: Response, name: str, value: str, seconds: int | None = None) -> None:
    """Give the browser something to hold that no script sees and no other site makes it send."""
    secure = over_tls(request)
    full = f"__Host-{name}" if secure else name
    answer.set_cookie(full, value, max_age=seconds, path="/", secure=secure, httponly=True, samesite="strict")


def drop_cookie(request: Request, answer: Response, name: str) -> None:
    """Take it back."""
    set_cookie(request, answer, name, "", 0)


def over_tls(request: Request) -> bool:
    """Whether the browser reaches us by TLS, which a proxy does for us: by what we were told at the start, never by a header."""
    settings: Settings = request.app.state.settings
    secure = {one for one in settings.origins if one.startswith("https://")}
    host = hostname(request.headers.get("host", ""))
    return request.headers.get("origin", "") in secure or any(urlsplit(one).hostname == host for one in secure)


def client_of(request: Request) -> str:
    """The address that the connection comes from. What a proxy says of whom it asks for is not believed."""
    return request.client.host if request.client is not None else ""


def field(body: bytes, name: str) -> str:
    """A field of a form; "" where it is absent or twice there."""
    try:
        found = parse_qs(body.decode(), max_num_fields=100, keep_blank_values=True).get(name, [])
    except ValueError:
        return ""
    return found[0] if len(found) == 1 else ""


async def _body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and kind not in _FORMS:
        raise HTTPException(415, "the body must be a form (application/x-www-form-urlencoded) or JSON")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise HTTPException(415, "the body must not be compressed")
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        raise HTTPException(400, "the length of the body is said in two ways, which a proxy may take for two requests")
    too_large = HTTPException(413, f"the body is larger than {_BODY >> 10} KiB; a reason has at most 2000 characters")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > _BODY:
        raise too_large
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _BODY:
            raise too_large
    return body


def _again(body: bytes, receive: Receive) -> Receive:
    """Give the body to whoever asks next; what comes after it comes from the client."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
