"""The server of `bilevel app`: what it answers, and to whom."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
from app_fixtures import circle, png, taught, zigzag

from bilevel.app.routes import FILES
from bilevel.app.server import listen
from bilevel.errors import BilevelError


def send(served, method, path, body=None, **headers):
    """Status, headers and content of a request with exactly these headers."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)) as connection:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None and "Content-Length" not in headers:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        if body is not None:
            connection.send(body)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def test_a_class_is_made_taught_asked_about_renamed_and_removed(page_of_desk):
    def does(method, path, body=None, **headers):
        status, _, content = send(page_of_desk, method, path, body, **headers)
        assert status == 200, content
        return json.loads(content)

    first = does("POST", "/classes", png(circle()), X_Class_Name="c%C3%A9rcle")["made"]
    state = does("POST", "/classes", png(zigzag()), X_Class_Name="zigzag", X_Picture_Name="a%20b.png")
    assert [one["name"] for one in state["classes"]] == ["cércle", "zigzag"]
    assert state["classes"][1]["pictures"][0]["name"] == "a b.png"
    more = does("POST", f"/classes/{first}/pictures", png(circle(0.05)))["made"]
    assert does("POST", "/ask", png(circle(-0.05)))["ranked"][0]["name"] == "cércle"
    assert does("PUT", f"/classes/{first}", b'{"name": "ring"}')["classes"][0]["name"] == "ring"
    assert does("PUT", "/settings", b'{"rate": 0.1}')["none"]["rate"] == 0.1
    assert does("PUT", "/settings", b'{"model": "zoo:omniglot-20way-1shot"}')["model"]["used"].endswith("20way-1shot")
    for kind in ("shown", "seen"):
        status, headers, content = send(page_of_desk, "GET", f"/pictures/{more}/{kind}.png")
        assert status == 200 and headers["content-type"] == "image/png" and content[:4] == b"\x89PNG"
    status, headers, content = send(page_of_desk, "GET", "/classifier.safetensors")
    assert status == 200 and "my.safetensors" in headers["content-disposition"] and len(content) > 10_000
    assert len(does("DELETE", f"/pictures/{more}")["classes"][0]["pictures"]) == 1
    assert len(does("DELETE", f"/classes/{first}")["classes"]) == 1
    assert len(does("POST", "/undo")["classes"]) == 2
    assert does("DELETE", "/classes")["classes"] == []


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"Host": "evil.example"}, "evil.example"),  # DNS rebinding
        ({"Host": "127.0.0.1.evil.example:80"}, "evil.example"),
        ({"Host": "evil.example:8642"}, "evil.example"),
        ({"Host": ""}, "an empty host"),
        ({"Origin": "https://evil.example"}, "evil.example"),
        ({"Origin": "null"}, "null"),
        ({"Origin": "http://127.0.0.1:1"}, "127.0.0.1:1"),  # another server of this machine
        ({"Sec-Fetch-Site": "cross-site"}, "another page"),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"}, "another page"),
    ],
)
def test_other_web_pages_are_refused(page_of_desk, headers, why):
    taught(page_of_desk.desk)
    given = {name.replace("-", "_"): value for name, value in headers.items()}
    for method, path in (
        ("DELETE", "/classes"),
        ("GET", "/state"),
        ("POST", "/undo"),
        ("GET", "/pictures/2/shown.png"),
    ):
        status, _, content = send(page_of_desk, method, path, **given)
        assert status == 403 and why in json.loads(content)["error"], (method, path)
    assert len(page_of_desk.desk.state()["classes"]) == 2


def test_the_page_itself_and_programs_are_not_refused(page_of_desk):
    own = f"127.0.0.1:{page_of_desk.port}"
    for headers in (
        {"Origin": f"http://{own}", "Sec_Fetch_Site": "same-origin"},
        {"Host": "localhost:9000", "Origin": "http://localhost:9000"},  # through a forwarded port
        {},
    ):
        assert send(page_of_desk, "GET", "/state", **headers)[0] == 200
    # A link from elsewhere may open the page.
    assert send(page_of_desk, "GET", "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200
    assert send(page_of_desk, "GET", "/state", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 403


def test_every_answer_forbids_frames_and_foreign_scripts(page_of_desk):
    for path in ("/", "/state", "/page.js", "/nothing"):
        headers = send(page_of_desk, "GET", path)[1]
        assert "default-src 'none'" in headers["content-security-policy"], path
        assert headers["x-frame-options"] == "DENY" and headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers and "server" not in headers


@pytest.mark.parametrize("how", [{}, {"Content_Length": "13000000"}, {"Content_Length": "x"}])
def test_bodies_that_are_too_large_are_not_read(page_of_desk, how):
    body = b"x" * 13_000_000 if not how else b"x"
    try:
        status, _, content = send(page_of_desk, "POST", "/ask", body, **how)
    except (BrokenPipeError, ConnectionResetError):  # the server closed the connection before all was sent
        return
    assert status in (400, 413) and (how or "12 MB" in json.loads(content)["error"])


def test_a_body_without_a_length_is_counted(page_of_desk):
    connection = socket.create_connection(("127.0.0.1", page_of_desk.port), timeout=30)
    with connection:
        connection.sendall(b"POST /ask HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        part = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        try:
            for _ in range(250):  # 16 MB
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass
        connection.settimeout(30)
        try:
            answer = connection.recv(4096)
        except ConnectionResetError:
            return
    assert b" 413 " in answer.split(b"\r\n")[0]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "why"),
    [
        ("POST", "/ask", b"no picture", 400, "cannot be read"),
        ("POST", "/ask", b"", 400, "empty"),
        ("POST", "/classes", png(circle()), 400, "needs a name"),
        ("PUT", "/classes/1", b"not json", 400, "not JSON"),
        ("PUT", "/classes/1", b"[1]", 400, "not a JSON object"),
        ("PUT", "/classes/1", b"[" * 100_000, 400, "not JSON"),
        ("PUT", "/settings", b'{"rate": "x"}', 400, "wrong type"),
        ("PUT", "/settings", b'{"rate": 1e999}', 400, "cannot be inf"),
        ("PUT", "/settings", b'{"model": "/etc"}', 400, "no model"),
        ("DELETE", "/classes/7", None, 400, "was removed"),
        ("GET", "/pictures/7/shown.png", None, 400, "was removed"),
        ("GET", "/../desk.py", None, 404, "There is no GET"),
        ("GET", "/%2e%2e/desk.py", None, 404, "There is no GET"),
        ("GET", "/index.html.bak", None, 404, "There is no GET"),
        ("POST", "/state", b"", 405, "There is no POST"),
    ],
)
def test_what_cannot_be_done_is_answered_with_a_sentence(page_of_desk, method, path, body, status, why):
    found, _, content = send(page_of_desk, method, path, body)
    assert found == status and why in json.loads(content)["error"]


def test_the_page_names_no_other_host():
    for file in FILES.values():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.", text), file


def test_it_listens_to_this_machine_only_and_says_where_it_cannot():
    with listen(None) as opened, listen(None) as other:
        assert opened.getsockname()[0] == other.getsockname()[0] == "127.0.0.1"
        opened.listen()
        with pytest.raises(BilevelError, match="--port"):
            listen(opened.getsockname()[1])


def test_the_command_serves_until_it_is_interrupted(tmp_path):
    (tmp_path / "known" / "ring").mkdir(parents=True)
    (tmp_path / "known" / "ring" / "a.png").write_bytes(png(circle()))
    (tmp_path / "known" / "ring" / "b.png").write_bytes(b"nothing")
    (tmp_path / "known" / "ring" / "c.png").symlink_to("nowhere.png")
    command = [sys.executable, "-m", "bilevel", "app", "--no-open", "--port", "0", "--support", "known"]
    paths = os.pathsep.join(str(Path(place).resolve()) for place in sys.path if place)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        address = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())[0]
        with urllib.request.urlopen(f"{address}state", timeout=30) as answer:
            assert [one["name"] for one in json.load(answer)["classes"]] == ["ring"]
    finally:
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Nothing was written" in out
    assert "b.png cannot be read" in errors and "c.png cannot be read" in errors and "Traceback" not in errors
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.png", "b.png", "c.png", "known", "ring"]
