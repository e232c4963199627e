"""HAProxy as Manta runs it: Serve renders its configuration and starts it, and what is started is
our launcher, which makes that configuration ours and becomes HAProxy.

    Serve's HAProxyManager --haproxy.cfg--> launcher: rewrite, check --exec--> haproxy

Serve's template says nothing of slow heads, of many connections from one address, of TLS or of who
may reach the statistics. `rewrite` puts that in, and refuses a file that it does not recognise: a
setting that has lost its place must not be lost in silence.
"""
