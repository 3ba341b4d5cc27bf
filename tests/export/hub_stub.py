"""A server on this machine with the file layout and the requests of the Hugging Face Hub that huggingface_hub uses."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class HubStub(ThreadingHTTPServer):
    """Repositories as {name: [(commit, {file: content}), …]}, oldest commit first, and a log of requests."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories, self.log = {}, []
        self.address = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def commit(self, name, files):
        """Add a commit to a repository and return its hash."""
        history = self.repositories.setdefault(name, [])
        merged = {**(history[-1][1] if history else {}), **files}
        commit = hashlib.sha1(repr((name, len(history), sorted(files))).encode()).hexdigest()
        history.append((commit, merged))
        return commit

    def find(self, name, revision):
        """Return (commit, files) of a branch or commit, or None."""
        history = self.repositories.get(name, [])
        if revision == "main":
            return history[-1] if history else None
        return next((entry for entry in history if entry[0] == revision), None)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, content=b"", **headers):
        if isinstance(content, (dict, list)):
            content, headers = json.dumps(content).encode(), {"Content-Type": "application/json", **headers}
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        words = unquote(urlsplit(self.path).path).strip("/").split("/")
        self.server.log.append((self.command, "/".join(words)))
        if len(words) == 5 and words[2] == "resolve":
            name, revision, file = "/".join(words[:2]), words[3], words[4]
            if name not in self.server.repositories:
                return self.reply(404, X_Error_Code="RepoNotFound")
            found = self.server.find(name, revision)
            if found is None:
                return self.reply(404, X_Error_Code="RevisionNotFound")
            commit, files = found
            if file not in files:
                return self.reply(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            tag = hashlib.sha256(files[file]).hexdigest()
            return self.reply(200, files[file], ETag=f'"{tag}"', X_Repo_Commit=commit)
        if words[:2] == ["api", "models"]:
            name = "/".join(words[2:4])
            if name not in self.server.repositories:
                return self.reply(404, X_Error_Code="RepoNotFound")
            found = self.server.find(name, words[5] if len(words) > 5 else "main")
            return self.reply(200, {"id": name, "sha": found[0] if found else None, "siblings": []})
        return self.reply(404)

    def do_POST(self):
        words = unquote(urlsplit(self.path).path).strip("/").split("/")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.log.append((self.command, "/".join(words)))
        if words == ["api", "repos", "create"]:
            details = json.loads(body)
            name = f"{details.get('organization') or 'user'}/{details['name']}"
            if name == "user/forbidden":
                return self.reply(403, {"error": "forbidden"})
            self.server.repositories.setdefault(name, [])
            return self.reply(200, {"url": f"{self.server.address}/{name}"})
        if words == ["api", "validate-yaml"]:
            return self.reply(200, {"errors": [], "warnings": []})
        name, action = "/".join(words[2:4]), words[4]
        if action == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.reply(200, {"files": files})
        if action == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            commit = self.server.commit(name, {file["path"]: base64.b64decode(file["content"]) for file in files})
            address = f"{self.server.address}/{name}/commit/{commit}"
            return self.reply(200, {"success": True, "commitUrl": address, "commitOid": commit})
        return self.reply(404)
