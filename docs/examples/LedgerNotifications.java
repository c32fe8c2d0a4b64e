package bookmender;

import com.fasterxml.jackson.databind.*;
import com.fasterxml.jackson.databind.node.*;
import com.google.common.hash.Hashing;
import io.netty.util.concurrent.DefaultThreadFactory;
import java.lang.reflect.*;
import java.math.BigInteger;
import java.net.URI;
import java.net.http.WebSocket;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.*;
import org.apache.bookkeeper.client.api.*;
import org.apache.bookkeeper.client.api.BKException.Code;

/**
 * Keeps ledgers readable while their copies move: one connection to bookmender's notify servers tells a
 * process which of its ledgers changed.
 *
 * <p>A handle that was opened with recovery keeps the metadata of that moment. When the copies have moved
 * and the old bookies are gone, all its reads fail (apache/bookkeeper#4613). What {@link #open} returns
 * then reads through another handle. Copy this file; it needs Java 11 and the BookKeeper client (4.16):
 *
 * <pre>{@code
 * var servers = List.of("http://notify1:7319", "http://notify2:7319");
 * var ledgers = new LedgerNotifications(servers, HttpClient.newHttpClient()::newWebSocketBuilder, "reader");
 * var how = bookKeeper.newOpenLedgerOp().withLedgerId(4711).withPassword(password).withRecovery(true);
 * ReadHandle ledger = ledgers.open(bookKeeper, how).get();
 * ledger.read(0, ledger.getLastAddConfirmed()); // as before, for as long as you like
 * ledgers.staleFor(); // for your metrics
 * ledger.close();
 * }</pre>
 *
 * <p>While no server can be reached, ledgers read as they are. Changes of that time are told afterwards.
 * Programs that keep something else of a ledger {@link #register} a listener.
 */
public final class LedgerNotifications implements AutoCloseable {
    public static final long UNKNOWN = -1; // a version that the server does not know: read the metadata
    private static final System.Logger LOG = System.getLogger(LedgerNotifications.class.getName());
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final int KEYS_A_REGISTER = 2_000;
    private static final long CONNECT_MS = 10_000, BEAT_MS = 15_000, SILENT_MS = 45_000, STALE_MS = 30_000;
    private static final long BACKOFF_MS = 500, TICK_MS = 1_000, GATHER_MS = 10, LAG_MS = 15_000, LATE_MS = 5_000;

    /** Is told of the changes of one ledger, on the one thread of the notifications: it must not wait. */
    public abstract static class Listener {
        private final long ledgerId;
        private long told; // the latest version that this listener knows
        private boolean isConfirmed; // a server has answered: the position counts for this listener

        /** {@code known}: the zxid of the latest change that the listener knows; 0: none. */
        protected Listener(long ledgerId, long known) {
            this.ledgerId = ledgerId;
            this.told = known;
        }

        /** {@code version}: the zxid of the latest change, or UNKNOWN. A change may be told again. */
        protected abstract void changed(long version, boolean isDeleted);

        /** The servers will not tell of this ledger. {@code code}: for example {@code too_many}. */
        protected void refused(String code) {
            LOG.log(System.Logger.Level.ERROR, "no notifications of ledger " + ledgerId + ": " + code);
        }
    }

    private final List<String> given;
    private List<String> servers; // given, and those that the last welcome named
    private final Supplier<WebSocket.Builder> sockets;
    private final String name;
    private final ScheduledThreadPoolExecutor thread;
    private volatile Connection connection;
    private volatile long position; // all changes up to this zxid were told to confirmed listeners
    private volatile long freshMs = nowMs();
    // The rest is used on the thread only.
    private String feed; // zxids of another feed mean nothing
    private final Map<Long, Set<Listener>> wanted = new HashMap<>();
    private final Set<Long> unsent = new LinkedHashSet<>();
    private int server, failures;
    private boolean isStale;

    /** {@code sockets}: may add a header, as for a token. {@code name}: of this process, for operators. */
    public LedgerNotifications(List<String> servers, Supplier<WebSocket.Builder> sockets, String name) {
        this.servers = given = List.copyOf(servers);
        this.sockets = sockets;
        this.name = name;
        server = ThreadLocalRandom.current().nextInt(servers.size());
        var threads = new DefaultThreadFactory("ledger-notifications", true);
        thread = new ScheduledThreadPoolExecutor(1, threads, new ThreadPoolExecutor.DiscardPolicy());
        connect();
        later(TICK_MS, this::tick);
    }

    /** Opens a ledger, and opens it again, without recovery, when it changed. Use {@code how} only here. */
    public CompletableFuture<ReadHandle> open(BookKeeper bookKeeper, OpenBuilder how) {
        long known = position; // what is read after this is not older
        return how.execute().thenApply(handle -> {
            var ledger = new FollowedLedger(bookKeeper, how.withRecovery(false), handle, known);
            register(ledger);
            later(LAG_MS, ledger::check);
            Class<?>[] types = {ReadHandle.class};
            return (ReadHandle) Proxy.newProxyInstance(ReadHandle.class.getClassLoader(), types, ledger);
        });
    }

    /** Tells the listener if its ledger is newer than what it knows, and of each change. Once for each. */
    public void register(Listener listener) {
        later(0, () -> {
            wanted.computeIfAbsent(listener.ledgerId, id -> new HashSet<>()).add(listener);
            unsent.add(listener.ledgerId);
        });
        later(GATHER_MS, this::send);
    }

    public void unregister(Listener listener) {
        later(0, () -> {
            wanted.computeIfPresent(
                    listener.ledgerId, (id, all) -> all.remove(listener) && all.isEmpty() ? null : all);
            unsent.add(listener.ledgerId);
        });
        later(GATHER_MS, this::send);
    }

    /** How old may be what listeners and opened ledgers know; empty while it is fresh. */
    public Optional<Duration> staleFor() {
        return Optional.of(Duration.ofMillis(nowMs() - freshMs)).filter(age -> age.toMillis() > STALE_MS);
    }

    /** Ends the connection. Ledgers stay open, and learn nothing more. */
    @Override public void close() {
        thread.shutdownNow();
        connection.opened.thenAccept(WebSocket::abort);
    }

    private final class Connection implements WebSocket.Listener { // as in notifications/client_state.py
        private final String url = servers.get(server % servers.size());
        private final AtomicBoolean isLost = new AtomicBoolean(); // no frame counts after that
        private final TreeMap<Integer, List<Listener>> pending = new TreeMap<>(); // not answered, by n
        private CompletableFuture<WebSocket> opened = new CompletableFuture<>(), sent;
        private String text = "";
        private boolean isWelcome;
        private int n, wholeN = Integer.MAX_VALUE; // of the frame that ended the first registration of all
        private long begunMs = nowMs(), saidMs = begunMs, heardMs = begunMs;
        private final TreeMap<Integer, Long> askedMs = new TreeMap<>(); // when, not answered, by n
        private long aheadMs; // by how much this clock is ahead of the server's, at least
        private boolean isLate; // the last complete answer seemed to be late

        ObjectNode registering(boolean isAll) {
            askedMs.put(++n, nowMs());
            return JSON.createObjectNode().put("n", n).put("is_all", isAll);
        }

        void say(String type, ObjectNode frame) {
            saidMs = nowMs();
            sent = sent.thenCompose(socket -> socket.sendText(frame.put("type", type).toString(), true));
            sent.exceptionally(error -> lost(this, error + ": " + error.getCause(), 0));
        }

        @Override public CompletionStage<?> onText(WebSocket socket, CharSequence part, boolean isLast) {
            String frame = text + part;
            text = isLast ? "" : frame;
            if (isLast) {
                later(0, () -> receive(this, frame));
            }
            socket.request(1);
            return null;
        }

        @Override public CompletionStage<?> onClose(WebSocket socket, int code, String reason) {
            return lost(this, "closed with code " + code, 0);
        }

        @Override public void onError(WebSocket socket, Throwable error) {
            lost(this, error.toString(), 0);
        }
    }

    private void connect() {
        var opening = connection = new Connection();
        URI uri = URI.create(opening.url.replaceFirst("^http", "ws")).resolve("/v1/notifications");
        opening.opened = opening.sent = sockets.get().connectTimeout(Duration.ofMillis(CONNECT_MS))
                .subprotocols("bookmender.notify.v1").buildAsync(uri, opening);
        String resume = feed == null ? null : feed + ":L=" + position;
        ObjectNode hello = JSON.createObjectNode().put("client", UUID.randomUUID() + "").put("name", name);
        opening.say("hello", hello.put("resume", resume));
    }

    private <T> T lost(Connection which, String reason, long retryAfterMs) {
        which.opened.thenAccept(WebSocket::abort);
        if (which.isLost.compareAndSet(false, true)) {
            later(0, () -> {
                LOG.log(System.Logger.Level.INFO, "lost " + which.url + ": " + reason);
                server++;
                failures = nowMs() - which.begunMs > SILENT_MS ? 0 : failures + 1;
                long jitterMs = ThreadLocalRandom.current().nextLong(BACKOFF_MS << Math.min(failures, 6));
                later(retryAfterMs + jitterMs, this::connect);
            });
        }
        return null;
    }

    private void tick() {
        later(TICK_MS, this::tick);
        Connection now = connection;
        if (nowMs() - now.heardMs > SILENT_MS) {
            lost(now, "silent", 0);
        } else if (now.isWelcome && nowMs() - now.saidMs >= (now.isLate ? LATE_MS : BEAT_MS)) {
            boolean isSettled = now.pending.isEmpty() && unsent.isEmpty(); // else nothing to compare: -1
            ObjectNode beat = JSON.createObjectNode().put("n", isSettled ? now.n : -1);
            now.say("beat", beat.put("digest", digest()).put("count", wanted.size()));
            if (now.isLate && isSettled) {
                now.say("register", now.registering(false)); // the answer tells the server's clock
            }
        }
        if (staleFor().isPresent() != isStale) {
            isStale = !isStale;
            LOG.log(System.Logger.Level.WARNING, "changes are " + (isStale ? "not told" : "told again"));
        }
    }

    private void receive(Connection from, String text) {
        from.heardMs = nowMs();
        try {
            JsonNode frame = JSON.readTree(text);
            String type = from.isLost.get() ? "" : frame.path("type").asText(); // later ones may have others
            if (type.equals("welcome")) {
                feed = frame.path("feed").asText();
                var named = new LinkedHashSet<>(given);
                frame.path("urls").forEach(url -> named.add(url.asText()));
                servers = List.copyOf(named);
                if (frame.path("resync").asBoolean()) { // what was told has no meaning in this feed
                    position = 0;
                    wanted.values().forEach(all -> all.forEach(each -> each.told = 0));
                }
                from.isWelcome = true;
                from.aheadMs = from.saidMs - frame.path("sent_ms").asLong(); // made after the hello
                send();
            } else if (type.equals("changes")) {
                frame.path("changes").forEach(this::tell);
                int n = frame.path("n").asInt(-1);
                if (n >= from.wholeN) { // only a complete answer to all registrations moves the position
                    position = Math.max(position, frame.path("positions").path("L").asLong());
                    noteFresh(from, frame, n);
                    var answered = from.pending.headMap(n, true);
                    answered.values().forEach(all -> all.forEach(each -> each.isConfirmed = true));
                    answered.clear();
                }
            } else if (type.equals("refused")) {
                for (JsonNode key : frame.path("keys")) {
                    listeners(key).forEach(each -> each.refused(frame.path("code").asText()));
                    listeners(key).forEach(this::unregister);
                }
            } else if (type.equals("goodbye")) {
                if (frame.path("code").asText().equals("digest")) { // it did not know all registrations
                    wanted.values().forEach(all -> all.forEach(each -> each.isConfirmed = false));
                }
                lost(from, "goodbye: " + frame.path("code"), frame.path("retry_after_ms").asLong());
            }
        } catch (Exception error) { // also a listener's. The next server tells it again
            lost(from, "a frame failed: " + error, 0);
        }
    }

    /** The frame may have waited in the network: what counts is when it was made, as in client_state.py. */
    private void noteFresh(Connection from, JsonNode frame, int n) {
        long sentMs = frame.path("sent_ms").asLong(), nowMs = nowMs();
        var answered = from.askedMs.headMap(n, true);
        answered.values().forEach(askedMs -> from.aheadMs = Math.max(from.aheadMs, askedMs - sentMs));
        answered.clear();
        long madeMs = Math.min(nowMs, sentMs + from.aheadMs); // a paused clock may have lagged
        from.isLate = nowMs - madeMs > LATE_MS;
        freshMs = Math.max(freshMs, madeMs - frame.path("age_ms").asLong());
    }

    private void tell(JsonNode change) {
        long version = change.path(1).asLong(UNKNOWN);
        for (Listener each : listeners(change.path(0))) {
            if (version == UNKNOWN || version > each.told) {
                each.changed(version, change.path(2).asBoolean());
                each.told = Math.max(each.told, version);
            }
        }
    }

    private Set<Listener> listeners(JsonNode key) {
        return Set.copyOf(wanted.getOrDefault(Long.parseLong(key.asText().substring(1)), Set.of()));
    }

    /** Sends registrations: all of them first, then what has been added and removed. */
    private void send() {
        Connection to = connection;
        boolean isAll = to.n == 0;
        var ids = new ArrayList<>(isAll ? wanted.keySet() : unsent);
        for (int first = 0; to.isWelcome && (first < ids.size() || to.n == 0); first += KEYS_A_REGISTER) {
            unsent.clear();
            ObjectNode frame = to.registering(isAll && first == 0);
            ArrayNode add = frame.putArray("add"), drop = frame.putArray("remove");
            to.wholeN = isAll ? to.n : to.wholeN;
            for (long id : ids.subList(first, Math.min(ids.size(), first + KEYS_A_REGISTER))) {
                Set<Listener> all = wanted.getOrDefault(id, Set.of());
                to.pending.computeIfAbsent(to.n, n -> new ArrayList<>()).addAll(all);
                all.stream().mapToLong(each -> Math.max(each.told, each.isConfirmed ? position : 0)).min()
                        .ifPresentOrElse(v -> add.addArray().add("L" + id).add(v), () -> drop.add("L" + id));
            }
            to.say("register", frame);
        }
    }

    String digest() {
        Function<Long, byte[]> hash = id -> Hashing.sha256().hashBytes(("L" + id).getBytes()).asBytes();
        return String.format("%032x", wanted.keySet().stream().map(hash)
                .map(bytes -> new BigInteger(1, Arrays.copyOf(bytes, 16)))
                .reduce(BigInteger.ZERO, BigInteger::add).mod(BigInteger.ONE.shiftLeft(128)));
    }

    private void later(long delayMs, Runnable task) {
        thread.schedule(task, delayMs, TimeUnit.MILLISECONDS);
    }

    private static long nowMs() {
        return System.nanoTime() / 1_000_000;
    }

    private final class FollowedLedger extends Listener implements InvocationHandler {
        private final BookKeeper bookKeeper;
        private final OpenBuilder how;
        private volatile ReadHandle current;
        private LedgerMetadata metadata; // as opened: a handle may follow it, but not its end
        private volatile boolean isClosed;
        private CompletableFuture<?> checks = CompletableFuture.completedFuture(null); // in turn

        FollowedLedger(BookKeeper bookKeeper, OpenBuilder how, ReadHandle handle, long known) {
            super(handle.getId(), known);
            this.bookKeeper = bookKeeper;
            this.how = how;
            current = handle;
            metadata = handle.getLedgerMetadata();
        }

        @Override protected void changed(long version, boolean isDeleted) {
            check();
            later(LAG_MS, this::check); // ZooKeeper servers lag by syncLimit at most: 10 s
        }

        private void check() {
            checks = checks.thenCompose(before -> bookKeeper.getLedgerMetadata(current.getId()))
                    .thenCompose(now -> isClosed || now.equals(metadata)
                            ? CompletableFuture.completedFuture(current) : how.execute())
                    .handle(this::checked);
        }

        private Void checked(ReadHandle handle, Throwable error) {
            ReadHandle old = current;
            int rc = org.apache.bookkeeper.client.BKException.getExceptionCode(error);
            if (error == null && handle != old) {
                metadata = handle.getLedgerMetadata();
                current = handle;
                (isClosed ? handle : old).closeAsync(); // reads of the old handle go on
            } else if (error != null && !isClosed && rc != Code.NoSuchLedgerExistsOnMetadataServerException) {
                LOG.log(System.Logger.Level.WARNING, "cannot open ledger " + old.getId() + ": " + error);
                later(LAG_MS, this::check);
            }
            return null;
        }

        @Override public Object invoke(Object proxy, Method method, Object[] given) throws Throwable {
            if (method.getName().startsWith("close")) {
                isClosed = true;
                unregister(this);
            }
            Object target = method.getDeclaringClass() == Object.class ? this : current;
            try {
                return method.getName().equals("equals") ? proxy == given[0] : method.invoke(target, given);
            } catch (InvocationTargetException error) {
                throw error.getCause();
            }
        }
    }
}
