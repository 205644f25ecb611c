"""The local page of `bilevel app`: draw or drop a few pictures of each class, and see new ones recognised at once.

`Desk` is what is on the page; `routes` are its addresses, `guard` keeps other web pages out, `server` serves it, and
`page/` has its files. Nothing is fetched from anywhere, and nothing is written.
"""

from bilevel import extras

extras.require("starlette", "uvicorn", extra="app", purpose="bilevel.app")
