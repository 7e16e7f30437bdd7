"""An S3 server of the tests' own."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def s3_server(address: str) -> Iterator[str]:
    """A bucket on a server at this address; gives a storage root, to be formatted with a folder."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each request
    server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    client = boto3.client("s3", endpoint_url=f"http://{address}:{port}", region_name="us-east-1")
    client.create_bucket(Bucket="bucket")
    yield f"s3://bucket/{{}}?scheme=http&endpoint_override={address}:{port}&region=us-east-1"
    server.stop()
