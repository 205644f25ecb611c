"""The local page of `bilevel app`: draw or drop a few pictures of each class, and see new ones recognised at once.

`Desk` is the state of the page, `routes` its addresses, `guard` refuses requests of other web pages, `server` serves
the page, and `page/` has its files. Nothing is downloaded, and no file is written.
"""

from bilevel import extras

extras.require("starlette", "uvicorn", extra="app", purpose="bilevel.app")
