"""HAProxy as Manta runs it: our launcher rewrites the configuration that Serve renders.

  Serve's HAProxyManager --haproxy.cfg--> launcher: rewrite, check --exec--> haproxy

Serve's template has no settings for slow request heads, many connections from one address, TLS or
access to the statistics. `rewrite` adds them. It refuses a file that it does not recognise, so that
no setting is lost unnoticed.
"""
