"""Requests that lie, swell or dawdle, of every kind that we know, and a process that sends them at a fixed rate.

`python hostile_traffic.py PORT MODEL` reads numbers from its standard input: so many requests are sent, RATE a second,
and when the last answer is there (who dawdles is cut off then) a line says how many got which status; 0 is none.
"""

import asyncio
import base64
import io
import json
import struct
import sys
import zlib
from collections import Counter

from PIL import Image
from raw_client import RawClient, write_request

RATE = 50.0
PATIENCE = 30.0  # seconds for an answer
HEADER = "Inference-Header-Content-Length"
GIGAPIXEL = 1 << 15  # a side
LEAVES, SLOW = "leaves at once", ("slow body", "slow head")


def v2(model, document, binary=b"", **headers):
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    told = {HEADER: len(text), **headers} if binary else headers
    return write_request(f"/v2/models/{model}/infer", text + binary, told)


def tf(model, text):
    return write_request(f"/v1/models/{model}:predict", text)


def image(model, data, kind="png"):
    return write_request(f"/v2/models/{model}/infer", data, {"Content-Type": f"image/{kind}"})


def tensor(name="image", datatype="UINT8", shape=(1, 32, 32, 3), **more):
    return {"inputs": [{"name": name, "datatype": datatype, "shape": list(shape), **more}]}


def elements(model, images):
    """Encoded images as the elements of a tensor."""
    data = b"".join(struct.pack("<I", len(each)) + each for each in images)
    asked = tensor(datatype="BYTES", shape=(len(images),), parameters={"binary_data_size": len(data)})
    return v2(model, asked, data)


def claim(side):
    """A PNG that says that it is this large, and has nothing more to say."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"")


def encode(side, form, **options):
    """One colour, so that few bytes have many pixels."""
    out = io.BytesIO()
    Image.new("RGB", (side, side)).save(out, form, **options)
    return out.getvalue()


def kinds(model):
    """Bytes to send, by what is wrong with them."""
    row = bytes(32 * 32 * 3)
    lie = tensor(parameters={"binary_data_size": 10**9})
    return {
        "size beyond the body": v2(model, lie, row),
        "size below the shape's": v2(model, tensor(parameters={"binary_data_size": 5}), row),
        "header beyond the body": v2(model, tensor(), row, **{HEADER: 10**15}),
        "negative shape": v2(model, tensor(shape=(-1, 32, 32, 3), parameters={"binary_data_size": len(row)}), row),
        "huge shape": v2(model, tensor(shape=(2**31 - 1, 32, 32, 3), data=[1])),
        "shape that no machine has": v2(model, tensor(shape=(10**30, 10**30), data=[1])),
        "unknown type": v2(model, tensor(datatype="FP7", data=[1])),
        "NaN": tf(model, b'{"instances": [[[[NaN, Infinity, -Infinity]]]]}'),
        "deep JSON": v2(model, b'{"inputs": ' + b"[" * 100_000),
        "deep objects": tf(model, b'{"a":' * 100_000),
        "deep data": v2(model, b'{"inputs": [{"name": "image", "shape": [1], "datatype": "UINT8", "data": '
                        + b"[" * 900 + b"]" * 900 + b"}]}"),
        "million empty tensors": v2(model, b'{"inputs": [' + b",".join([b"{}"] * 10**6) + b"]}"),
        "million empty rows": tf(model, b'{"instances": [' + b",".join([b"{}"] * 10**6) + b"]}"),
        "million empty lists": tf(model, b'{"instances": [' + b",".join([b"[]"] * 10**6) + b"]}"),
        "long JSON": v2(model, b'{"inputs": [{"name": "image", "datatype": "UINT8", "shape": [1, 32, 32, 3], "data": ['
                        + b",".join([b"1"] * 4_000_000) + b"]}]}"),
        "long JSON for TensorFlow": tf(model, b'{"instances": [' + b",".join([b"1.5"] * 2_000_000) + b"]}"),
        "long text": tf(model, b'{"instances": ["' + b"a" * 8_000_000 + b'"]}'),
        "gigapixel": image(model, claim(GIGAPIXEL)),
        "gigapixels together": elements(model, 50 * [claim(8000)]),
        "large PNG": image(model, encode(8000, "PNG")),
        "large WebP": image(model, encode(8191, "WEBP"), "webp"),
        "large JPEG": image(model, encode(4000, "JPEG", progressive=True), "jpeg"),
        "large PNG in base64": tf(model, b'{"instances": [{"b64": "' + base64.b64encode(encode(4000, "PNG")) + b'"}]}'),
        "element beyond the end": elements(model, [b"x"]).replace(b"\x01\0\0\0x", b"\xff\xff\xff\xffx"),
        "body beyond the limit": v2(model, b"").replace(b"Content-Length: 0", b"Content-Length: 1000000000000"),
        "no HTTP": b"\x16\x03\x01\x02\x00 hello\r\n\r\n",
        "odd address": write_request("/v2/models/x%00/%2e%2e/infer"),
        "long header": write_request("/v2", b"", {"X": "a" * 600_000}, "GET"),
        "compressed": v2(model, b"x", **{"Content-Encoding": "gzip"}),
        LEAVES: v2(model, tensor(parameters={"binary_data_size": len(row)}), row),
        "slow body": v2(model, b" " * 10_000)[:-9_990],
        "slow head": b"POST /v2/models/x/infer HTTP/1.1\r\nHost: x\r\nX-Long: ",
    }  # fmt: skip


async def send_one(port, kind, request, is_over):
    """The status that came back, 0 where the connection was closed without one, or is that of one who dawdles."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        if kind == LEAVES:
            return 0
        while kind in SLOW:
            if is_over.is_set():
                return 0
            await asyncio.sleep(0.1)
            writer.write(b" ")
        async with asyncio.timeout(PATIENCE):
            return (await RawClient(reader, writer).read())[0]
    except (OSError, asyncio.IncompleteReadError):
        return 0
    finally:
        writer.close()


async def send(port, requests, count):
    """So many at RATE, whatever becomes of them: statuses by kind, and seconds by which the last was late."""
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()
    names, start, sent = list(requests), loop.time(), []
    for number in range(count):
        await asyncio.sleep(start + number / RATE - loop.time())
        kind = names[number % len(names)]
        sent.append((kind, asyncio.create_task(send_one(port, kind, requests[kind], is_over))))
    late = loop.time() - start - (count - 1) / RATE
    await asyncio.gather(*(task for kind, task in sent if kind not in SLOW))
    is_over.set()
    statuses = {}
    for kind, task in sent:
        statuses.setdefault(kind, Counter())[await task] += 1
    return {"late": late, "statuses": statuses}


def check_statuses(statuses):
    """An answer or one sentence to each: no 5xx but 503; 0 is a connection that was closed, or never answered."""
    for kind, counts in statuses.items():
        assert all(int(status) < 500 or int(status) == 503 for status in counts), (kind, counts)


def main(port, model, *chosen):
    requests = {name: data for name, data in kinds(model).items() if not chosen or name in chosen}
    names = sorted(
        requests, key=lambda name: zlib.crc32(name.encode())
    )  # the costly ones apart from each other
    requests = {name: requests[name] for name in names}
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(asyncio.run(send(int(port), requests, int(line)))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
