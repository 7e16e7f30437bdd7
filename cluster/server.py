"""The job server of a Ray cluster, asked with patience and errors for people.

Everything a cluster is asked goes through Ray's own client over HTTP. What is added here: the
token, time limits, and messages that say what to do.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from cluster.settings import ClusterSettings
from stages.errors import UserError

# Of one request. Ray's client has none, and a machine that is switched off never answers.
REQUEST_SECONDS = 60.0
# Ray lets these take the place of the address that is asked for.
ADDRESS_VARIABLES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")


# Ray's client tells of every upload and every closed connection.
for _module in ("dashboard_sdk", "job.sdk"):
    logging.getLogger(f"ray.dashboard.modules.{_module}").setLevel(logging.WARNING)


class Unreachable(UserError):
    """The cluster does not answer now; it may later.

    shown: characters of a job's log that were printed before.
    """

    shown = 0


class JobServer(JobSubmissionClient):
    """Jobs of one cluster.

    Raises:
        UserError: nothing answers there, it is no Ray dashboard, or it wants another token.
    """

    def __init__(self, cluster: ClusterSettings) -> None:
        if not cluster.address:
            raise UserError(
                "the cluster's file names no address; write the head's dashboard into it "
                "(address: http://HOST:8265)"
            )
        self.cluster = cluster
        token = _token(cluster)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        verify = cluster.ca_file or True
        if cluster.ca_file and not Path(cluster.ca_file).exists():
            raise UserError(f"ca_file: there is no file {cluster.ca_file}")
        hidden = {name: os.environ.pop(name, None) for name in ADDRESS_VARIABLES}
        try:
            super().__init__(cluster.address, headers=headers, verify=verify)
        except (ValueError, KeyError, TypeError, RuntimeError):  # no JSON, or not Ray's
            raise UserError(
                f"{cluster.address}: what answers there is not the dashboard of a Ray cluster; "
                "check host and port (8265 unless the head was started with another)"
            ) from None
        finally:
            os.environ.update({name: value for name, value in hidden.items() if value is not None})

    @property
    def ray_version(self) -> str:
        """Ray's version there."""
        return str(self._server_ray_version)

    def _do_request(self, method: str, endpoint: str, **more: Any) -> requests.Response:
        try:
            found = super()._do_request(method, endpoint, timeout=REQUEST_SECONDS, **more)
        except requests.exceptions.RequestException as error:
            raise _unreachable(self.cluster.address, error) from None
        except AuthenticationError:
            raise UserError(_about_token(self.cluster, bool(self._headers))) from None
        if found.status_code == 400 and "https" in found.text.lower():
            raise UserError(_wants_tls(self.cluster.address))
        return found

    def _raise_error(self, r: requests.Response) -> None:
        lines = r.text.strip().splitlines() or [""]
        text = next((line for line in reversed(lines) if line.strip()), "")
        raise UserError(f"{self.cluster.address}: refused ({r.status_code}): {text.strip()[:500]}")

    def job(self, job_id: str) -> JobDetails | None:
        """A job, or None where the cluster knows none with this id."""
        found = self._do_request("GET", f"/api/jobs/{job_id}")
        if found.status_code == 404:
            return None
        if found.status_code != 200:
            self._raise_error(found)
        return JobDetails(**found.json())

    def ours(self) -> list[JobDetails]:
        """Jobs that were submitted by Sentray, newest first."""
        jobs = [job for job in self.list_jobs() if "sentray" in about(job)]
        return sorted(jobs, key=lambda job: job.start_time or 0, reverse=True)

    def find(self, name: str) -> JobDetails:
        """The job with this id, or the newest one of the recipe with this name.

        Raises:
            UserError: there is neither.
        """
        jobs = self.ours()
        for job in jobs:
            if name in (job.submission_id, about(job)["recipe"]):
                return job
        known = ", ".join(str(job.submission_id) for job in jobs[:5]) or "none"
        raise UserError(
            f"{self.cluster.address} knows no job or recipe '{name}'; its newest jobs: {known}"
        )

    def print_log(
        self, job_id: str, shown: int, quiet_seconds: float, out: Callable[[str], None]
    ) -> int:
        """Prints what the job's log has after `shown` characters, as it comes.

        Returns when the job has ended, or after `quiet_seconds` without a line: the connection may
        be dead without anyone having said so.

        Returns:
            how many characters of the log have been printed, from its beginning.

        Raises:
            Unreachable: the connection was lost; what was printed is in its `shown`.
        """

        async def follow() -> int:
            seen = 0
            nonlocal shown
            lines: AsyncIterator[str] = self.tail_job_logs(job_id)
            while True:
                try:
                    text = await asyncio.wait_for(anext(lines), quiet_seconds)
                except (StopAsyncIteration, TimeoutError):
                    return shown
                seen += len(text)
                if seen > shown:
                    out(text[len(text) - (seen - shown) :])
                    shown = seen

        try:
            return asyncio.run(follow())
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            lost = _unreachable(self.cluster.address, error)
            lost.shown = shown
            raise lost from None


def about(job: JobDetails) -> dict[str, str]:
    """What `submit` wrote down about a job: sentray (the command), recipe, user, digest."""
    return job.metadata or {}


def _token(cluster: ClusterSettings) -> str | None:
    """Ray's token, looked for where Ray looks for it."""
    if cluster.token_variable is not None:
        token = os.environ.get(cluster.token_variable, "").strip()
        if not token:
            raise UserError(
                f"token_variable: the environment variable {cluster.token_variable} is not set; it "
                f"holds the token of {cluster.address}"
            )
        return token
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _about_token(cluster: ClusterSettings, sent: bool) -> str:
    where = cluster.token_variable or "RAY_AUTH_TOKEN, or the file ~/.ray/auth_token"
    if sent:
        return f"{cluster.address}: this token is not the cluster's; check {where}"
    return f"{cluster.address}: the cluster asks for a token; set {where}"


def _wants_tls(address: str) -> str:
    return (
        f"{address}: answers, but not in plain HTTP; if the cluster uses TLS, write https:// "
        "(port 6379 or 10001 is Ray's own and no dashboard)"
    )


def _unreachable(address: str, error: Exception) -> Unreachable:
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return Unreachable(
            f"{address}: its certificate is not trusted here; name the file of the authority that "
            "signed it as ca_file in the cluster's file"
        )
    if "WRONG_VERSION_NUMBER" in text or "SSL" in text:
        return Unreachable(f"{address}: answers, but not with TLS; write http://")
    breaks = any(mark in text for mark in ("BadStatusLine", "RemoteDisconnected", "reset by peer"))
    if breaks and address.startswith("http://"):
        return Unreachable(_wants_tls(address))
    if any(mark in text for mark in ("NameResolution", "resolve", "Name or service")):
        return Unreachable(f"{address}: there is no such host; check the name, or your VPN")
    if "refused" in text:
        return Unreachable(
            f"{address}: nothing listens there; check that the cluster runs with its dashboard "
            "(ray[default], --dashboard-host) and that the port is reachable"
        )
    if "timed out" in text:
        return Unreachable(f"{address}: no answer; check the address, firewall and VPN")
    reason = (text.splitlines() or [type(error).__name__])[0]
    return Unreachable(f"{address}: the connection failed ({reason[:200]})")
